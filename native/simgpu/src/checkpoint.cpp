// See checkpoint.hpp.
#include "checkpoint.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <vector>

#include "address_space.hpp"
#include "config.hpp"
#include "context.hpp"
#include "device.hpp"
#include "error.hpp"
#include "physical.hpp"
#include "process.hpp"
#include "ptx/ptx.hpp"

namespace simgpu {
namespace {

std::atomic<CUprocessState> current_state{CU_PROCESS_STATE_RUNNING};
// Whether memory of another process was mapped when the checkpoint was made: its contents are not ours to save.
bool had_imported_memory = false;
std::atomic<unsigned> loan{0};
bool stored_by_caller = false; // the device memory of this checkpoint is not here
// The real driver maps one piece of private memory, populated by the kernel, for all that it saves. Ours is for the
// control state, and with it for the memory of the devices where the configuration says so.
uint64_t *saved_state = nullptr;
size_t saved_bytes = 0;

std::string text_of(const CUuuid &uuid) {
    return {uuid.bytes, sizeof uuid.bytes};
}

bool drain_streams(Deadline deadline) {
    for (const auto &context : contexts().select([](const Context &) { return true; })) {
        if (!context->synchronize(deadline))
            return false;
    }
    return true;
}

// The devices after a restore with these pairs; empty when the pairs are not acceptable.
std::vector<Device> remapped(const GpuPairs &pairs) {
    std::vector<Device> result = devices();
    if (pairs.empty())
        return result;
    std::map<std::string, CUuuid> table;
    for (const auto &[from, to] : pairs)
        table[text_of(from)] = to;
    // As on a real driver, every GPU of the machine must be listed, whichever the process sees.
    for (int index = 0; index < config().device_count; ++index) {
        if (!table.contains(text_of(uuid_of_index(index))))
            return {};
    }
    std::map<int, int> taken;
    for (Device &device : result) {
        device.index = index_of_uuid(table.at(text_of(uuid_of_index(device.index))));
        if (device.index < 0 || taken[device.index]++ > 0)
            return {};
    }
    return result;
}

uint64_t control_word(size_t index) {
    return 0x9e3779b97f4a7c15u * (index + 1);
}

// Room for the control state, and `memory_bytes` behind it.
bool map_saved_state(size_t memory_bytes) {
    const size_t size = config().control_state_bytes + memory_bytes;
    if (size == 0)
        return true;
    void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    saved_state = static_cast<uint64_t *>(memory);
    saved_bytes = size;
    return true;
}

// Calls `work` with each piece of the control state, as the real driver copies it: by memcpy, from one of two buffers.
template <typename Work> void each_control_piece(const Work &work) {
    constexpr size_t kPieceWords = (size_t{2} << 20) / sizeof(uint64_t);
    std::vector<uint64_t> buffers[2];
    const size_t words = config().control_state_bytes / sizeof(uint64_t);
    for (size_t begin = 0; begin < words; begin += kPieceWords) {
        std::vector<uint64_t> &buffer = buffers[begin / kPieceWords % 2];
        buffer.resize(std::min(kPieceWords, words - begin));
        work(buffer, begin);
    }
}

void save_control_state() {
    each_control_piece([](std::vector<uint64_t> &buffer, size_t begin) {
        for (size_t i = 0; i < buffer.size(); i++) {
            if (saved_state[begin + i] != 0)
                std::abort(); // the kernel's memory is clear
            buffer[i] = control_word(begin + i);
        }
        memcpy(saved_state + begin, buffer.data(), buffer.size() * sizeof(uint64_t));
    });
}

void unmap_saved_state() {
    if (saved_state != nullptr)
        munmap(saved_state, saved_bytes);
    saved_state = nullptr;
}

bool load_control_state() {
    bool whole = true;
    each_control_piece([&whole](std::vector<uint64_t> &buffer, size_t begin) {
        memcpy(buffer.data(), saved_state + begin, buffer.size() * sizeof(uint64_t));
        for (size_t i = 0; i < buffer.size(); i++)
            whole &= buffer[i] == control_word(begin + i);
    });
    if (config().scribbles && saved_state != nullptr)
        saved_state[0] = 0;
    unmap_saved_state();
    return whole;
}

} // namespace

CUprocessState checkpoint_state() {
    return current_state.load();
}

CUresult checkpoint_lock(unsigned timeout_ms) {
    if (current_state != CU_PROCESS_STATE_RUNNING)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (CUresult code = injected_failure("lock"); code != CUDA_SUCCESS)
        return code;
    imitate_latency("lock");
    Deadline deadline;
    if (timeout_ms > 0)
        deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
    Gate &gate = Process::instance().gate;
    if (!gate.close(deadline) || !drain_streams(deadline)) {
        gate.open();
        return CUDA_ERROR_NOT_READY;
    }
    current_state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

CUresult checkpoint_save() {
    if (current_state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (CUresult code = injected_failure("checkpoint"); code != CUDA_SUCCESS)
        return code;
    if (AddressSpace::instance().any_managed())
        return CUDA_ERROR_NOT_SUPPORTED;
    imitate_latency("checkpoint");
    ptx::shutdown_workers();
    AddressSpace &space = AddressSpace::instance();
    had_imported_memory = false;
    auto memories = Physical::all();
    for (const auto &physical : memories)
        had_imported_memory |= physical->imported() || physical->shareable_host_memory();
    had_imported_memory |= AddressSpace::instance().any_shared_registration();
    size_t memory_bytes = 0;
    for (const auto &physical : memories)
        memory_bytes += config().one_mapping ? physical->size_bytes() : 0;
    if (!map_saved_state(memory_bytes)) {
        ptx::resume_workers();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    // All bytes are copied before anything is taken apart, so that a host without memory leaves the target as it was.
    bool detaching = false;
    try {
        char *room =
            config().one_mapping ? reinterpret_cast<char *>(saved_state) + config().control_state_bytes : nullptr;
        for (const auto &physical : memories) {
            physical->save(room);
            if (room != nullptr)
                room += physical->size_bytes();
        }
        save_control_state();
        detaching = true;
        space.detach_all();
    } catch (const Error &error) {
        if (detaching)
            space.attach_all();
        for (const auto &physical : memories)
            physical->drop_saved();
        unmap_saved_state();
        ptx::resume_workers();
        return error.code;
    }
    for (const auto &physical : memories)
        physical->unload();
    current_state = CU_PROCESS_STATE_CHECKPOINTED;
    return CUDA_SUCCESS;
}

CUresult checkpoint_load(const GpuPairs &pairs) {
    if (current_state != CU_PROCESS_STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stored_by_caller)
        return CUDA_ERROR_INVALID_VALUE;
    if (CUresult code = injected_failure("restore"); code != CUDA_SUCCESS)
        return code;
    // Remapping came with driver 580, that is CUDA 13.0.
    if (!pairs.empty() && config().driver_version < 13000)
        return CUDA_ERROR_NOT_SUPPORTED;
    auto target = remapped(pairs);
    if (target.empty())
        return CUDA_ERROR_INVALID_VALUE;
    imitate_latency("restore");
    if (had_imported_memory) {
        std::fprintf(stderr,
                     "simulated GPU: the process cannot be restored: memory shared with other processes (imported, "
                     "exportable host memory, or shared and registered) was held when it was checkpointed\n");
        current_state = CU_PROCESS_STATE_FAILED;
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    auto before = std::exchange(devices(), target);
    auto memories = Physical::all();
    bool attaching = false;
    try {
        for (const auto &physical : memories)
            physical->load();
        attaching = true;
        AddressSpace::instance().attach_all();
    } catch (const Error &error) {
        if (attaching)
            AddressSpace::instance().detach_all();
        for (const auto &physical : memories)
            physical->unload();
        devices() = before;
        return error.code;
    }
    for (const auto &physical : memories)
        physical->drop_saved();
    if (!load_control_state()) {
        std::fprintf(stderr, "simulated GPU: the control state is not what was saved\n");
        current_state = CU_PROCESS_STATE_FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    ptx::resume_workers();
    current_state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

CUresult checkpoint_lend(std::vector<int> &descriptors) {
    if (current_state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (CUresult code = injected_failure("checkpoint"); code != CUDA_SUCCESS)
        return code;
    const auto memories = Physical::all();
    const bool foreign = std::any_of(memories.begin(), memories.end(),
                                     [](const auto &one) { return one->imported() || one->shareable_host_memory(); });
    if (AddressSpace::instance().any_managed() || AddressSpace::instance().any_shared_registration() || foreign)
        return CUDA_ERROR_NOT_SUPPORTED;
    imitate_latency("checkpoint");
    ptx::shutdown_workers();
    if (!map_saved_state(0)) {
        ptx::resume_workers();
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    save_control_state();
    AddressSpace::instance().detach_all();
    for (const auto &physical : memories) {
        if (physical->device() != kHostMemory)
            descriptors.push_back(physical->duplicate_fd());
    }
    ++loan;
    current_state = kCheckpointing;
    return CUDA_SUCCESS;
}

CUresult checkpoint_lend_back(const GpuPairs &pairs, std::vector<int> &descriptors) {
    if (current_state != CU_PROCESS_STATE_CHECKPOINTED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (!stored_by_caller)
        return CUDA_ERROR_INVALID_VALUE;
    if (CUresult code = injected_failure("restore"); code != CUDA_SUCCESS)
        return code;
    auto target = remapped(pairs);
    if (target.empty())
        return CUDA_ERROR_INVALID_VALUE;
    imitate_latency("restore");
    auto before = std::exchange(devices(), target);
    const auto memories = Physical::all();
    try {
        for (const auto &physical : memories) {
            if (physical->device() == kHostMemory)
                continue;
            physical->renew();
            descriptors.push_back(physical->duplicate_fd());
        }
    } catch (const Error &error) {
        for (const auto &physical : memories) {
            if (physical->device() != kHostMemory)
                physical->unload();
        }
        devices() = before;
        return error.code;
    }
    ++loan;
    current_state = kRestoring;
    return CUDA_SUCCESS;
}

CUresult checkpoint_complete() {
    const auto memories = Physical::all();
    if (current_state == kCheckpointing) {
        for (const auto &physical : memories) {
            if (physical->device() != kHostMemory)
                physical->unload();
        }
        stored_by_caller = true;
        current_state = CU_PROCESS_STATE_CHECKPOINTED;
        return CUDA_SUCCESS;
    }
    if (current_state != kRestoring)
        return CUDA_ERROR_ILLEGAL_STATE;
    AddressSpace::instance().attach_all();
    stored_by_caller = false;
    if (!load_control_state()) {
        current_state = CU_PROCESS_STATE_FAILED;
        return CUDA_ERROR_UNKNOWN;
    }
    ptx::resume_workers();
    current_state = CU_PROCESS_STATE_LOCKED;
    return CUDA_SUCCESS;
}

unsigned checkpoint_loan() {
    return loan;
}

CUresult checkpoint_abandon() {
    if (current_state == kCheckpointing) {
        AddressSpace::instance().attach_all();
        unmap_saved_state();
        ptx::resume_workers();
        current_state = CU_PROCESS_STATE_LOCKED;
        return CUDA_SUCCESS;
    }
    if (current_state != kRestoring)
        return CUDA_ERROR_ILLEGAL_STATE;
    for (const auto &physical : Physical::all()) {
        if (physical->device() != kHostMemory)
            physical->unload();
    }
    current_state = CU_PROCESS_STATE_CHECKPOINTED;
    return CUDA_SUCCESS;
}

CUresult checkpoint_unlock() {
    if (current_state != CU_PROCESS_STATE_LOCKED)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (CUresult code = injected_failure("unlock"); code != CUDA_SUCCESS)
        return code;
    imitate_latency("unlock");
    current_state = CU_PROCESS_STATE_RUNNING;
    Process::instance().gate.open();
    return CUDA_SUCCESS;
}

} // namespace simgpu
