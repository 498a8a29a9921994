// handover_calls: the driver calls that a handover and a return of GPU memory are made of, timed one by one.
//
// bench/handover.py starts it and writes commands to its standard input, a line each; each is answered by one line of
// JSON on standard output. Descriptors travel over the Unix socket whose number is the one argument.
//
//   calls HANDLES MIB THREADS LAYOUT HOW  a handover and a return within this process
//   ahead HANDLES MIB                     exports beside a thread that gives the GPU work: what they cost that thread
//   hold HANDLES MIB STATE                memory written and exported, its descriptors sent; then left as STATE says:
//                                         released, released_open (its own descriptors stay open), unmapped, mapped
//   back THREADS                          from there to mapped, and checked. `released` receives its descriptors again;
//                                         `unmapped` and `mapped` one, to see whether that is still their memory
//   end                                   gives everything back
//
// LAYOUT: `one` reserved range with all mappings side by side, or `own` ranges. HOW: `each` mapping is unmapped and
// opened by a call of its own, or `all` of a thread's share in one call (which needs `one`). Times are milliseconds for
// all handles together; threads are there before a time begins.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <sys/resource.h>
#include <sys/socket.h>
#include <thread>
#include <utility>
#include <vector>

#include "driver_support.hpp"

namespace {

constexpr size_t kMostFds = 240; // in one packet; the kernel's SCM_MAX_FD is 253
constexpr unsigned kPattern = 0x57464f00;

CUcontext context = nullptr;
CUdevice device = 0;
int descriptors = -1; // the socket

double now_ms() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

// `work(begin, end)` on shares of `count` by `threads` threads side by side; milliseconds from the first's begin.
double side_by_side(size_t threads, size_t count, const std::function<void(size_t, size_t)> &work) {
    if (threads == 1) {
        const double begin = now_ms();
        work(0, count);
        return now_ms() - begin;
    }
    std::barrier ready(static_cast<std::ptrdiff_t>(threads) + 1);
    std::vector<std::thread> all;
    for (size_t t = 0; t < threads; ++t)
        all.emplace_back([&, t] {
            TARGET_CHECK(cuCtxSetCurrent(context));
            ready.arrive_and_wait();
            work(count * t / threads, count * (t + 1) / threads);
            ready.arrive_and_wait();
        });
    ready.arrive_and_wait();
    const double begin = now_ms();
    ready.arrive_and_wait();
    const double took = now_ms() - begin;
    for (std::thread &one : all)
        one.join();
    return took;
}

void send_fds(int to, const std::vector<int> &fds) {
    for (size_t first = 0; first < fds.size(); first += kMostFds) {
        const size_t count = std::min(kMostFds, fds.size() - first);
        alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
        char byte = 0;
        iovec part{&byte, 1};
        msghdr message{};
        message.msg_iov = &part;
        message.msg_iovlen = 1;
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(header), &fds[first], count * sizeof(int));
        if (sendmsg(to, &message, 0) != 1)
            target::fail(std::string("sendmsg: ") + strerror(errno));
    }
}

// One packet's descriptors, added to `fds`.
void receive_fds(int from, std::vector<int> *fds) {
    alignas(cmsghdr) char control[CMSG_SPACE(kMostFds * sizeof(int))] = {};
    char byte = 0;
    iovec part{&byte, 1};
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const cmsghdr *header = nullptr;
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || (header = CMSG_FIRSTHDR(&message)) == nullptr)
        target::fail(std::string("recvmsg: ") + strerror(errno));
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    const size_t had = fds->size();
    fds->resize(had + count);
    memcpy(fds->data() + had, CMSG_DATA(header), count * sizeof(int));
}

struct Times {
    std::ostringstream text;
    void add(const char *name, double ms) { text << ", \"" << name << "_ms\": " << ms; }
};

// Pieces of physical memory and where they are mapped.
class Pieces {
  public:
    Pieces(size_t count, size_t size_bytes, bool one_range) : size_(size_bytes), one_range_(one_range) {
        handles_.resize(count);
        addresses_.resize(count);
        fds_.assign(count, -1);
    }

    void create(Times *times) {
        CUmemAllocationProp properties{};
        properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
        times->add("create", side_by_side(1, count(), [&](size_t begin, size_t end) {
                       for (size_t i = begin; i < end; ++i)
                           TARGET_CHECK(cuMemCreate(&handles_[i], size_, &properties, 0));
                   }));
        times->add("reserve", side_by_side(1, count(), [&](size_t begin, size_t end) {
                       if (one_range_)
                           TARGET_CHECK(cuMemAddressReserve(&addresses_[0], size_ * count(), 0, 0, 0));
                       for (size_t i = begin; i < end; ++i) {
                           if (one_range_)
                               addresses_[i] = addresses_[0] + i * size_;
                           else
                               TARGET_CHECK(cuMemAddressReserve(&addresses_[i], size_, 0, 0, 0));
                       }
                   }));
    }

    double map(size_t threads) {
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i)
                TARGET_CHECK(cuMemMap(addresses_[i], size_, 0, handles_[i], 0));
        });
    }

    double set_access(size_t threads, bool all) {
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            if (all && begin < end)
                TARGET_CHECK(cuMemSetAccess(addresses_[begin], (end - begin) * size_, &access, 1));
            for (size_t i = begin; !all && i < end; ++i)
                TARGET_CHECK(cuMemSetAccess(addresses_[i], size_, &access, 1));
        });
    }

    double unmap(size_t threads, bool all) {
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            if (all && begin < end)
                TARGET_CHECK(cuMemUnmap(addresses_[begin], (end - begin) * size_));
            for (size_t i = begin; !all && i < end; ++i)
                TARGET_CHECK(cuMemUnmap(addresses_[i], size_));
        });
    }

    double release(size_t threads) {
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i)
                TARGET_CHECK(cuMemRelease(handles_[i]));
        });
    }

    double export_all(size_t threads) {
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i)
                TARGET_CHECK(
                    cuMemExportToShareableHandle(&fds_[i], handles_[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
        });
    }

    double import_all(size_t threads) {
        return side_by_side(threads, count(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i)
                TARGET_CHECK(cuMemImportFromShareableHandle(&handles_[i],
                                                            reinterpret_cast<void *>(static_cast<uintptr_t>(fds_[i])),
                                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        });
    }

    // Where the memory lies, as the driver tells it for what was imported.
    double ask_properties() {
        return side_by_side(1, count(), [&](size_t begin, size_t end) {
            CUmemAllocationProp properties{};
            for (size_t i = begin; i < end; ++i)
                TARGET_CHECK(cuMemGetAllocationPropertiesFromHandle(&properties, handles_[i]));
        });
    }

    double close_fds() {
        return side_by_side(1, count(), [&](size_t begin, size_t end) {
            for (size_t i = begin; i < end; ++i)
                close(std::exchange(fds_[i], -1));
        });
    }

    // Copies of the descriptors travel to another socket and are closed: what one way through a process costs.
    void pass(Times *times) {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0)
            target::fail("socketpair");
        std::vector<int> copies;
        times->add("pass", side_by_side(1, 1, [&](size_t, size_t) {
                       for (size_t first = 0; first < count(); first += kMostFds) {
                           const auto begin = fds_.begin() + static_cast<std::ptrdiff_t>(first);
                           const size_t some = std::min(kMostFds, count() - first);
                           send_fds(ends[0], {begin, begin + static_cast<std::ptrdiff_t>(some)});
                           receive_fds(ends[1], &copies);
                       }
                   }));
        times->add("close_copies", side_by_side(1, 1, [&](size_t, size_t) {
                       for (const int fd : copies)
                           close(fd);
                   }));
        close(ends[0]);
        close(ends[1]);
    }

    void write() {
        for (size_t i = 0; i < count(); ++i)
            TARGET_CHECK(cuMemsetD32Async(addresses_[i], kPattern + static_cast<unsigned>(i), size_ / 4, nullptr));
        TARGET_CHECK(cuCtxSynchronize());
    }

    // How many pieces do not begin and end with what was written to them.
    size_t wrong() const {
        size_t wrong = 0;
        for (size_t i = 0; i < count(); ++i) {
            unsigned words[2] = {};
            TARGET_CHECK(cuMemcpyDtoH(&words[0], addresses_[i], sizeof(unsigned)));
            TARGET_CHECK(cuMemcpyDtoH(&words[1], addresses_[i] + size_ - sizeof(unsigned), sizeof(unsigned)));
            const unsigned right = kPattern + static_cast<unsigned>(i);
            wrong += words[0] == right && words[1] == right ? 0 : 1;
        }
        return wrong;
    }

    // Whether what is written to the first piece is seen in the memory behind `fd`.
    bool same_as(int fd) const {
        CUmemGenericAllocationHandle handle = 0;
        CUdeviceptr address = 0;
        const CUmemAccessDesc access{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        TARGET_CHECK(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void *>(static_cast<uintptr_t>(fd)),
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        TARGET_CHECK(cuMemAddressReserve(&address, size_, 0, 0, 0));
        TARGET_CHECK(cuMemMap(address, size_, 0, handle, 0));
        TARGET_CHECK(cuMemSetAccess(address, size_, &access, 1));
        TARGET_CHECK(cuMemsetD32(addresses_[0], ~kPattern, 1));
        unsigned word = 0;
        TARGET_CHECK(cuMemcpyDtoH(&word, address, sizeof word));
        return word == ~kPattern;
    }

    void free_addresses() {
        if (one_range_)
            TARGET_CHECK(cuMemAddressFree(addresses_[0], size_ * count()));
        for (size_t i = 0; !one_range_ && i < count(); ++i)
            TARGET_CHECK(cuMemAddressFree(addresses_[i], size_));
    }

    size_t count() const { return handles_.size(); }
    std::vector<int> &fds() { return fds_; }

  private:
    size_t size_;
    bool one_range_;
    std::vector<CUmemGenericAllocationHandle> handles_;
    std::vector<CUdeviceptr> addresses_;
    std::vector<int> fds_;
};

void answer(const std::string &members) {
    std::cout << "{" << members << "}" << std::endl; // flushed: the other side waits for it
}

void run_calls(size_t handles, size_t mib, size_t threads, bool one_range, bool all) {
    Times times;
    Pieces pieces(handles, mib << 20, one_range);
    pieces.create(&times);
    times.add("first_map", pieces.map(1));
    times.add("first_access", pieces.set_access(1, all));
    pieces.write();
    times.add("export", pieces.export_all(threads));
    pieces.pass(&times);
    times.add("unmap", pieces.unmap(threads, all));
    times.add("release", pieces.release(threads));
    times.add("import", pieces.import_all(threads));
    times.add("properties", pieces.ask_properties());
    times.add("map", pieces.map(threads));
    times.add("access", pieces.set_access(threads, all));
    const size_t wrong = pieces.wrong();
    times.add("close", pieces.close_fds());
    pieces.unmap(1, false);
    pieces.release(1);
    pieces.free_addresses();
    answer("\"wrong\": " + std::to_string(wrong) + times.text.str());
}

// Work for the GPU in small pieces, each waited for, until `stop`; the longest and the mean of them in milliseconds.
struct Loop {
    double longest_ms = 0.0;
    double mean_ms = 0.0;
    void run(CUdeviceptr address, const std::function<bool()> &stop) {
        const double begin = now_ms();
        size_t steps = 0;
        for (double last = begin; !stop() || steps == 0; ++steps) {
            TARGET_CHECK(cuMemsetD32Async(address, 1, 1024, nullptr));
            TARGET_CHECK(cuStreamSynchronize(nullptr));
            const double now = now_ms();
            longest_ms = std::max(longest_ms, now - last);
            last = now;
        }
        mean_ms = (now_ms() - begin) / static_cast<double>(steps);
    }
};

void run_ahead(size_t handles, size_t mib) {
    Times times;
    Pieces pieces(handles, mib << 20, false);
    pieces.create(&times);
    pieces.map(1);
    pieces.set_access(1, false);
    CUdeviceptr address = 0;
    TARGET_CHECK(cuMemAlloc(&address, 1 << 20));
    Loop alone;
    const double until = now_ms() + 200.0;
    alone.run(address, [&] { return now_ms() > until; });
    std::atomic<bool> done{false};
    double export_ms = 0.0;
    std::thread exporter([&] {
        TARGET_CHECK(cuCtxSetCurrent(context));
        export_ms = pieces.export_all(1);
        done = true;
    });
    Loop beside;
    beside.run(address, [&] { return done.load(); });
    exporter.join();
    times.add("export", export_ms);
    times.add("step_alone", alone.mean_ms);
    times.add("step_alone_longest", alone.longest_ms);
    times.add("step_beside", beside.mean_ms);
    times.add("step_beside_longest", beside.longest_ms);
    TARGET_CHECK(cuMemFree(address));
    pieces.close_fds();
    pieces.unmap(1, false);
    pieces.release(1);
    pieces.free_addresses();
    answer("\"wrong\": 0" + times.text.str());
}

// Memory that is held in some state while the driver checkpoints and restores this process.
struct Held {
    Pieces pieces;
    std::string state;
};

std::unique_ptr<Held> run_hold(size_t handles, size_t mib, const std::string &state) {
    Times times;
    auto held = std::make_unique<Held>(Held{Pieces(handles, mib << 20, true), state});
    Pieces &pieces = held->pieces;
    pieces.create(&times);
    pieces.map(1);
    pieces.set_access(1, true);
    pieces.write();
    times.add("export", pieces.export_all(1));
    times.add("send", side_by_side(1, 1, [&](size_t, size_t) { send_fds(descriptors, pieces.fds()); }));
    if (state != "mapped")
        times.add("unmap", pieces.unmap(1, true));
    if (state == "released" || state == "released_open")
        times.add("release", pieces.release(1));
    if (state != "released_open")
        times.add("close", pieces.close_fds());
    answer("\"state\": \"" + state + "\"" + times.text.str());
    return held;
}

void run_back(Held *held, size_t threads) {
    Times times;
    Pieces &pieces = held->pieces;
    const bool released = held->state == "released" || held->state == "released_open";
    if (held->state == "released")
        times.add("receive", side_by_side(1, 1, [&](size_t, size_t) {
                      std::vector<int> fds;
                      while (fds.size() < pieces.count())
                          receive_fds(descriptors, &fds);
                      pieces.fds() = fds;
                  }));
    if (released)
        times.add("import", pieces.import_all(threads));
    if (held->state != "mapped") {
        times.add("map", pieces.map(threads));
        times.add("access", pieces.set_access(threads, true));
    }
    const size_t wrong = pieces.wrong();
    std::string same;
    if (!released) {
        std::vector<int> fds;
        receive_fds(descriptors, &fds);
        same = std::string(", \"same_memory\": ") + (pieces.same_as(fds.at(0)) ? "true" : "false");
    }
    answer("\"wrong\": " + std::to_string(wrong) + same + times.text.str());
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 2)
        target::fail("usage: handover_calls SOCKET");
    descriptors = atoi(argv[1]);
    rlimit files{};
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    TARGET_CHECK(cuInit(0));
    TARGET_CHECK(cuDeviceGet(&device, 0));
    context = target::create_context(device);
    size_t free_bytes = 0, total_bytes = 0;
    TARGET_CHECK(cuMemGetInfo(&free_bytes, &total_bytes));
    answer("\"pid\": " + std::to_string(getpid()) + ", \"free_bytes\": " + std::to_string(free_bytes));
    std::unique_ptr<Held> held;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string command, layout, how, state;
        size_t handles = 0, mib = 0, threads = 1;
        words >> command;
        if (command == "calls" && words >> handles >> mib >> threads >> layout >> how)
            run_calls(handles, mib, threads, layout == "one", how == "all");
        else if (command == "ahead" && words >> handles >> mib)
            run_ahead(handles, mib);
        else if (command == "hold" && words >> handles >> mib >> state)
            held = run_hold(handles, mib, state);
        else if (command == "back" && words >> threads && held)
            run_back(held.get(), threads);
        else if (command == "end")
            return 0;
        else
            target::fail("not understood: " + line);
    }
    return 0;
}
