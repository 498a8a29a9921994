// The agent's loop and its state machine; see agent.hpp and native/wire/wire.h, whose order it enforces.
//
// All signals are blocked in this thread, so no handler of the application ever runs here. While there is no connection
// it holds no file descriptor and sleeps in sigwaitinfo, so that nothing of ours is in the way of a CRIU dump.
#include "agent.hpp"

#include "access.hpp"
#include "capture.hpp"
#include "control_memory.hpp"
#include "cow_agent.hpp"
#include "debug.hpp"
#include "ending.hpp"
#include "fork.hpp"
#include "gate.hpp"
#include "handover.hpp"
#include "hosted.hpp"
#include "memory.hpp"
#include "quiesce.hpp"
#include "shadow_worker.hpp"
#include "spent.hpp"
#include "survey.hpp"
#include "thread.hpp"
#include "torch_clock.hpp"
#include "tracking_agent.hpp"
#include "transport.hpp"

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <optional>
#include <sys/syscall.h>
#include <unistd.h>

namespace woodfrog::interpose {
namespace {

using wire::State;
using wire::Status;
using wire::Type;

// Driver calls and nothing deep run on it; the default of some systems is less than drivers like.
constexpr size_t kStackBytes = size_t{2} << 20;
// For launches that wait to be evaluated when the process has come to rest; the application waits for it.
constexpr std::chrono::seconds kEvaluationLimit{2};
constexpr std::chrono::seconds kUnloadLimit{1};

// Time since boot, in clock ticks, at which this process started: field 22 of /proc/self/stat.
uint64_t start_ticks() {
    char text[1024];
    const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    const ssize_t length = read(fd, text, sizeof(text) - 1);
    close(fd);
    if (length <= 0)
        return 0;
    text[length] = '\0';
    const char *field = strrchr(text, ')'); // the command may contain anything, ')' too; it is field 2
    for (int number = 2; field != nullptr && number < 22; ++number)
        field = strchr(field + 1, ' ');
    return field == nullptr ? 0 : strtoull(field, nullptr, 10);
}

class Agent {
  public:
    explicit Agent(std::string path) : path_(std::move(path)) {}

    [[noreturn]] void run() {
        for (;;) {
            if (connection_.open(path_)) {
                serve();
                connection_.close();
            }
            wait_to_be_woken();
        }
    }

  private:
    void wait_to_be_woken() {
        sigset_t wake;
        sigemptyset(&wake);
        sigaddset(&wake, SIGRTMAX - WF_WAKE_SIGNAL_OFFSET);
        while (sigwaitinfo(&wake, nullptr) < 0) // EINTR: a stop and a continue, or CRIU
            ;
    }

    // Wakes that came while we were connected, from a daemon that could not know: one left over would end the coming
    // sleep at once, in the middle of a dump.
    static void forget_wakes() {
        sigset_t wake;
        sigemptyset(&wake);
        sigaddset(&wake, SIGRTMAX - WF_WAKE_SIGNAL_OFFSET);
        const timespec at_once{};
        while (sigtimedwait(&wake, nullptr, &at_once) > 0 || errno == EINTR)
            ;
    }

    bool say_hello() {
        wire::Hello hello{};
        hello.start_ticks = start_ticks();
        hello.operation = operation_;
        count_owned(&hello.owned_bytes, &hello.owned_count);
        hello.pid = static_cast<uint32_t>(getpid());
        hello.agent_tid = static_cast<uint32_t>(syscall(SYS_gettid));
        hello.state = static_cast<uint32_t>(state_);
        // Asked once: at a later hello the driver may be locked, and this must not wait.
        if (devices_ == 0)
            devices_ = device_count();
        hello.device_count = devices_;
        copy_text(hello.name, getenv("WOODFROG_NAME"));
        char build[sizeof(hello.build)];
        snprintf(build, sizeof(build), "wire %d, CUDA %d.%d", WF_WIRE_VERSION, CUDA_VERSION / 1000,
                 CUDA_VERSION % 1000 / 10);
        copy_text(hello.build, build);
        return connection_.send(Type::hello, 0, Status::ok, 0, &hello, sizeof(hello), nullptr, 0, 0, nullptr);
    }

    // Until the daemon detaches or goes away. What the state becomes then is wire.h's rule.
    void serve() {
        if (!say_hello())
            return lost();
        Packet packet;
        for (;;) {
            std::string why;
            switch (spent::timed(spent::What::waiting, [&] { return connection_.receive(&packet, &why); })) {
            case Connection::Received::closed:
                return lost();
            case Connection::Received::malformed:
                debug("a packet is refused: %s", why.c_str());
                if (!answer(packet, {Status::bad_message, CUDA_SUCCESS, 0, why}, now()))
                    return lost();
                continue;
            case Connection::Received::packet:
                break;
            }
            const Deadline began = now();
            const Type type = static_cast<Type>(packet.header.type);
            spent::begin(type);
            if (type != Type::return_batch)
                forget_return(); // the tables that it lists may change
            if (type == Type::return_batch) {
                if (!take_batch(packet, began))
                    return lost();
            } else if (type == Type::replace_batch) {
                if (!take_replacements(packet, began))
                    return lost();
            } else if (type == Type::guard) {
                Outcome outcome = state_ == State::returned ? Outcome{} : wrong_state("guard");
                if (guarding_.take(packet, &outcome) && !answer(packet, outcome, began))
                    return lost();
            } else {
                const Outcome outcome = obey(type, packet);
                packet.fds.clear(); // before the daemon goes on: it may have CRIU look at this process
                if (!answer(packet, outcome, began))
                    return lost();
            }
            if (type == Type::resume && state_ == State::running)
                settle_control_memory(); // takes some 30 ms, and the target runs already
            if (type == Type::detach)
                return;
        }
    }

    Outcome obey(Type type, const Packet &packet) {
        switch (type) {
        case Type::survey:
            return survey(packet.header.sequence);
        case Type::quiesce:
            return begin_quiesce(packet);
        case Type::hold:
            return hold_still(packet);
        case Type::export_memory:
            return begin_export(packet.header.sequence);
        case Type::release_memory:
            return release();
        case Type::resume:
            return go_on();
        case Type::dirty:
            return tell_dirty(packet);
        case Type::committed:
            return image_committed(packet);
        case Type::guard_end:
            return end_guard(packet.header.sequence);
        case Type::detach:
            cow::disarm();
            forget_wakes();
            return {};
        case Type::ping:
            return {};
        case Type::spent:
            return tell_spent(packet.header.sequence);
        case Type::control_memory:
            return prepare_control(packet);
        case Type::export_ahead:
            return state_ == State::running ? export_ahead() : wrong_state("export_ahead");
        case Type::stop_clock:
            return state_ == State::running ? Outcome{Status::ok, CUDA_SUCCESS, arm_torch_clock(), ""}
                                            : wrong_state("stop_clock");
        case Type::follow_access:
            return follow(packet);
        case Type::accessed:
            return send_accessed([&](const std::vector<wire::Handle> &handles, bool last) {
                return send_handles(Type::accessed_batch, packet.header.sequence, handles, nullptr, last);
            });
        case Type::hosted:
            return send_hosted([&](const std::vector<wire::Handle> &handles, const FdList &fds, bool last) {
                return send_handles(Type::hosted_batch, packet.header.sequence, handles, &fds, last);
            });
        default:
            return {Status::bad_message, CUDA_SUCCESS, packet.header.type, "an unknown command"};
        }
    }

    Outcome wrong_state(const char *command) const {
        static constexpr const char *kNames[] = {
#define WF_NAME(name, value) #name,
            WF_STATES(WF_NAME)
#undef WF_NAME
        };
        return {Status::wrong_state, CUDA_SUCCESS, 0,
                std::string(command) + " is not possible while the target is " + kNames[static_cast<size_t>(state_)]};
    }

    Outcome survey(uint64_t sequence) {
        // Of a frozen process only what needs no driver call can be told.
        if (state_ == State::released)
            return wrong_state("survey");
        const SurveyResult result = take_survey();
        const bool sent = connection_.send(Type::survey_result, sequence, Status::ok, WF_FLAG_LAST, &result.survey,
                                           sizeof(result.survey), result.devices.data(), sizeof(wire::Device),
                                           static_cast<uint32_t>(result.devices.size()), nullptr);
        return sent ? Outcome{} : Outcome{Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    }

    Outcome begin_quiesce(const Packet &packet) {
        wire::Quiesce body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "quiesce has the wrong length"};
        if (state_ != State::running && state_ != State::held)
            return wrong_state("quiesce");
        cow::disarm(); // its operation has failed and is not here to say so
        memcpy(&body, packet.payload.data(), sizeof(body));
        Outcome outcome = quiesce(now() + std::chrono::milliseconds(body.timeout_ms));
        if (outcome.ok()) {
            operation_ = body.operation;
            state_ = State::quiesced;
            stop_torch_clock();
            settle_access();
        } else {
            state_ = State::running;
        }
        return outcome;
    }

    Outcome hold_still(const Packet &packet) {
        wire::Quiesce body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "hold has the wrong length"};
        if (state_ != State::running && state_ != State::held)
            return wrong_state("hold");
        memcpy(&body, packet.payload.data(), sizeof(body));
        Held held;
        Outcome outcome = hold(std::chrono::milliseconds(body.timeout_ms), body.admit, &held);
        state_ = outcome.ok() && !held.capturing ? State::held : State::running;
        if (outcome.ok())
            outcome.value = (held.idle ? WF_HELD_IDLE : 0) | (held.capturing ? WF_HELD_CAPTURING : 0) |
                            uint64_t{held.submitted} << WF_HELD_SUBMITTED_SHIFT |
                            uint64_t{held.waiting} << WF_HELD_WAITING_SHIFT;
        return outcome;
    }

    Outcome begin_export(uint64_t sequence) {
        if (state_ != State::quiesced)
            return wrong_state("export_memory");
        Outcome outcome = export_memory(
            [&](const std::vector<wire::Handle> &handles, const FdList &fds, bool last) {
                return send_handles(Type::export_batch, sequence, handles, &fds, last);
            },
            [&](const std::vector<wire::Mapping> &mappings, bool last) {
                return connection_.send(Type::mapping_batch, sequence, Status::ok, last ? WF_FLAG_LAST : 0, nullptr, 0,
                                        mappings.data(), sizeof(wire::Mapping), static_cast<uint32_t>(mappings.size()),
                                        nullptr);
            },
            [&](const std::vector<wire::Shared> &shared, bool last) {
                return connection_.send(Type::shared_batch, sequence, Status::ok, last ? WF_FLAG_LAST : 0, nullptr, 0,
                                        shared.data(), sizeof(wire::Shared), static_cast<uint32_t>(shared.size()),
                                        nullptr);
            });
        if (outcome.ok())
            state_ = State::exported;
        return outcome;
    }

    // What may have been written since the last committed image. Nothing is told when launches are not followed.
    Outcome tell_dirty(const Packet &packet) {
        wire::Image body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "dirty has the wrong length"};
        if (state_ != State::quiesced && state_ != State::exported)
            return wrong_state("dirty");
        if (!shadow::on())
            return {};
        memcpy(&body, packet.payload.data(), sizeof(body));
        return send_dirty(connection_, packet.header.sequence,
                          shadow::take_report(body.operation, now() + kEvaluationLimit));
    }

    Outcome tell_spent(uint64_t sequence) {
        const std::vector<wire::Spent> rows = spent::all();
        const bool sent =
            connection_.send(Type::spent_batch, sequence, Status::ok, WF_FLAG_LAST, nullptr, 0, rows.data(),
                             sizeof(wire::Spent), static_cast<uint32_t>(rows.size()), nullptr);
        return sent ? Outcome{} : Outcome{Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
    }

    Outcome image_committed(const Packet &packet) {
        wire::Image body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "committed has the wrong length"};
        memcpy(&body, packet.payload.data(), sizeof(body));
        if (shadow::on())
            shadow::dirty_committed(body.operation);
        return {};
    }

    Outcome release() {
        if (state_ != State::exported)
            return wrong_state("release_memory");
        bool changed = false;
        if (shadow::on())
            shadow::unload_code(now() + kUnloadLimit);
        Outcome outcome = release_memory(&changed);
        // After a failure in the middle only a return leads on: it maps what is missing and accepts what is there.
        if (outcome.ok() || changed)
            state_ = State::released;
        return outcome;
    }

    Outcome go_on() {
        if (state_ == State::released)
            return wrong_state("resume");
        start_torch_clock(); // before the gate opens
        if (state_ != State::running)
            resume();
        state_ = State::running;
        return {Status::ok, CUDA_SUCCESS, control_memory_taken(), ""};
    }

    Outcome prepare_control(const Packet &packet) {
        wire::Control body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "control_memory has the wrong length"};
        if (state_ != State::running)
            return wrong_state("control_memory");
        memcpy(&body, packet.payload.data(), sizeof(body));
        if (packet.fds.size() != (body.offer == WF_CONTROL_SHARED ? 1 : 0))
            return {Status::bad_message, CUDA_SUCCESS, 0, "control_memory has the wrong number of descriptors"};
        switch (body.offer) {
        case WF_CONTROL_WITHDRAW:
            settle_control_memory();
            return {};
        case WF_CONTROL_OWN:
            return {Status::ok, CUDA_SUCCESS, offer_control_memory(body.bytes), ""};
        case WF_CONTROL_ASK:
            return {Status::ok, CUDA_SUCCESS, wanted_control_memory(body.bytes), ""};
        case WF_CONTROL_SHARED:
            return {Status::ok, CUDA_SUCCESS, offer_shared_control_memory(packet.fds.data()[0], body.bytes), ""};
        default:
            return {Status::bad_message, CUDA_SUCCESS, body.offer, "an unknown kind of control_memory"};
        }
    }

    Outcome follow(const Packet &packet) {
        wire::Follow body{};
        if (packet.payload.size() != sizeof(body))
            return {Status::bad_message, CUDA_SUCCESS, 0, "follow_access has the wrong length"};
        memcpy(&body, packet.payload.data(), sizeof(body));
        const bool at_rest = state_ == State::quiesced || state_ == State::released || state_ == State::returned;
        if (body.on != 0 && !at_rest)
            return wrong_state("follow_access");
        if (body.on != 0)
            follow_access();
        else
            leave_access(at_rest);
        return {};
    }

    // A batch of returned handles; the reply follows the last one and tells the first failure.
    bool take_batch(Packet &packet, Deadline began) {
        if (returned_.ok())
            returned_ = take_handles(packet);
        packet.fds.clear();
        if ((packet.header.flags & WF_FLAG_LAST) == 0)
            return true;
        Outcome outcome = returned_.ok() ? return_->finish() : returned_;
        forget_return();
        if (outcome.ok())
            state_ = State::returned;
        return answer(packet, outcome, began);
    }

    void forget_return() {
        returned_ = Outcome{};
        return_.reset();
    }

    Outcome take_handles(Packet &packet) {
        if (state_ != State::released && state_ != State::returned)
            return wrong_state("return_batch");
        const size_t count = packet.header.count;
        if (packet.payload.size() != count * sizeof(wire::Handle) || packet.fds.size() != count)
            return {Status::bad_message, CUDA_SUCCESS, 0, "return_batch has the wrong length"};
        if (!return_)
            return_.emplace();
        const bool same = (packet.header.flags & WF_FLAG_SAME) != 0;
        for (size_t i = 0; i < count; ++i) {
            wire::Handle handle{};
            memcpy(&handle, packet.payload.data() + i * sizeof(handle), sizeof(handle));
            if (Outcome outcome = return_->take(handle, packet.fds.take(i), same); !outcome.ok())
                return outcome;
        }
        return {};
    }

    // A batch of device memory for what lies on host memory; the reply follows the last one, after what was replaced.
    bool take_replacements(Packet &packet, Deadline began) {
        if (state_ != State::quiesced && replacing_.ok())
            replacing_ = wrong_state("replace_batch");
        std::vector<wire::Handle> replaced;
        if (replacing_.ok())
            replacing_ = replace_handles(packet, &replaced);
        packet.fds.clear();
        const bool last = (packet.header.flags & WF_FLAG_LAST) != 0;
        if (!send_handles(Type::replaced_batch, packet.header.sequence, replaced, nullptr, last))
            return false;
        if (!last)
            return true;
        Outcome outcome = replacing_;
        replacing_ = Outcome{};
        // Memory is missing where the application has some: the gate must not open.
        if (state_ == State::quiesced && missing_handles(Inventory()) != 0)
            state_ = State::released;
        return answer(packet, outcome, began);
    }

    bool send_handles(Type type, uint64_t sequence, const std::vector<wire::Handle> &handles, const FdList *fds,
                      bool last) {
        return connection_.send(type, sequence, Status::ok, last ? WF_FLAG_LAST : 0, nullptr, 0, handles.data(),
                                sizeof(wire::Handle), static_cast<uint32_t>(handles.size()), fds);
    }

    // The answer ends with the kernels that were launched meanwhile: should something have been written unseen, it was
    // by one of them.
    Outcome end_guard(uint64_t sequence) {
        uint64_t waits = 0;
        const std::vector<wire::Kernel> kernels = cow::kernels_of(cow::disarm(), &waits);
        if (!connection_.send(Type::kernel_batch, sequence, Status::ok, WF_FLAG_LAST, nullptr, 0, kernels.data(),
                              sizeof(wire::Kernel), static_cast<uint32_t>(kernels.size()), nullptr))
            return {Status::bad_message, CUDA_SUCCESS, 0, "the daemon is gone"};
        return {Status::ok, CUDA_SUCCESS, waits, ""};
    }

    bool answer(const Packet &packet, const Outcome &outcome, Deadline began) {
        spent::end();
        wire::Reply reply{};
        reply.elapsed_us =
            static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now() - began).count());
        reply.value = outcome.value;
        reply.driver_result = static_cast<int32_t>(outcome.driver_result);
        reply.state = static_cast<uint32_t>(state_);
        copy_text(reply.message, outcome.message.c_str());
        return connection_.send(Type::reply, packet.header.sequence, outcome.status, WF_FLAG_LAST, &reply,
                                sizeof(reply), nullptr, 0, 0, nullptr);
    }

    // The daemon is gone without a detach.
    void lost() {
        spent::end();
        forget_return();
        replacing_ = Outcome{};
        leave_access(false);
        cow::disarm();
        guarding_.forget();
        if (state_ == State::released)
            return;
        if (state_ != State::running) {
            debug("the daemon is gone: the target runs on");
            start_torch_clock();
            resume();
            state_ = State::running;
        }
        settle_control_memory();
    }

    static Deadline now() { return std::chrono::steady_clock::now(); }

    const std::string path_;
    Connection connection_;
    State state_ = State::running;
    uint64_t operation_ = 0;
    uint32_t devices_ = 0;
    std::optional<Return> return_; // a series of return batches that is not over
    Outcome returned_;             // its first failure
    Outcome replacing_;
    cow::Batches guarding_;
};

void *agent_thread(void *argument) {
    Agent *agent = static_cast<Agent *>(argument);
    const PassScope pass;             // a driver that calls itself through its exported names must not stop at the gate
    const RelaxedScope relaxed(true); // no call of this thread may harm a capture of another
    agent->run();
}

} // namespace

void start_agent() {
    static constinit std::atomic<bool> started{false};
    if (started.exchange(true))
        return;
    install_fork_handlers();
    watch_for_the_end();
    Agent *agent = new Agent(agent_socket_path());
    if (const int error = start_thread(WF_AGENT_THREAD_NAME, &agent_thread, agent, kStackBytes); error != 0)
        debug("no agent thread (errno %d): this process cannot be checkpointed by handover", error);
}

} // namespace woodfrog::interpose
