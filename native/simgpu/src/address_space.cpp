// See address_space.hpp.
#include "address_space.hpp"

#include <algorithm>
#include <sys/mman.h>

#include "error.hpp"

namespace simgpu {
namespace {

constexpr std::uint64_t kEveryDevice = ~std::uint64_t{0};

// A child of a fork has no CUDA: device memory must neither be kept alive nor be seen by it.
void keep_from_children(CUdeviceptr base, size_t size_bytes) {
    madvise(reinterpret_cast<void *>(base), size_bytes, MADV_DONTFORK);
}

int protection_of(const Mapping &mapping) {
    if (!mapping.application_mapped)
        return PROT_READ | PROT_WRITE;
    int protection = PROT_NONE;
    for (const auto *table : {&mapping.access, &mapping.host_access}) {
        for (const auto &[place, flags] : *table) {
            if (flags == CU_MEM_ACCESS_FLAGS_PROT_READ)
                protection |= PROT_READ;
            if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
                protection |= PROT_READ | PROT_WRITE;
        }
    }
    return protection;
}

Span span_of(const Mapping &mapping) {
    Span span{mapping.base, mapping.base + mapping.size_bytes, 0, 0};
    if (!mapping.application_mapped) {
        span.readable_by = span.writable_by = kEveryDevice;
        return span;
    }
    for (const auto &[device, flags] : mapping.access) {
        std::uint64_t bit = std::uint64_t{1} << device;
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
            span.readable_by |= bit;
        if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            span.writable_by |= bit;
    }
    return span;
}

} // namespace

AddressSpace &AddressSpace::instance() {
    static AddressSpace *space = new AddressSpace;
    return *space;
}

CUdeviceptr AddressSpace::reserve(size_t size_bytes, size_t alignment_bytes, CUdeviceptr wanted) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (wanted != 0 && wanted % alignment_bytes == 0) {
        void *hint = reinterpret_cast<void *>(wanted);
        void *got = mmap(hint, size_bytes, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
        if (got == hint) {
            keep_from_children(wanted, size_bytes);
            return wanted;
        }
        if (got != MAP_FAILED)
            munmap(got, size_bytes); // a kernel that does not know the flag
    }
    // Room for the alignment is taken first and what is too much given back.
    size_t padded = size_bytes + alignment_bytes;
    require(padded > size_bytes, CUDA_ERROR_OUT_OF_MEMORY);
    void *raw = mmap(nullptr, padded, PROT_NONE, kFlags, -1, 0);
    require(raw != MAP_FAILED, CUDA_ERROR_OUT_OF_MEMORY);
    auto start = reinterpret_cast<CUdeviceptr>(raw);
    CUdeviceptr base = (start + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
    if (base > start)
        munmap(raw, base - start);
    CUdeviceptr end = base + size_bytes;
    if (start + padded > end)
        munmap(reinterpret_cast<void *>(end), start + padded - end);
    keep_from_children(base, size_bytes);
    return base;
}

void AddressSpace::release(CUdeviceptr base, size_t size_bytes) {
    munmap(reinterpret_cast<void *>(base), size_bytes);
}

void AddressSpace::add_reservation(CUdeviceptr base, size_t size_bytes) {
    std::lock_guard lock(mutex_);
    reservations_[base] = size_bytes;
}

bool AddressSpace::remove_reservation(CUdeviceptr base, size_t size_bytes) {
    std::lock_guard lock(mutex_);
    auto it = reservations_.find(base);
    if (it == reservations_.end() || it->second != size_bytes)
        return false;
    reservations_.erase(it);
    return true;
}

bool AddressSpace::reserved(CUdeviceptr base, size_t size_bytes) const {
    std::lock_guard lock(mutex_);
    auto it = reservations_.upper_bound(base);
    if (it == reservations_.begin())
        return false;
    --it;
    size_t offset = base - it->first;
    return offset <= it->second && size_bytes <= it->second - offset;
}

void AddressSpace::place(const Mapping &mapping) const {
    if (!mapping.physical)
        return;
    void *base = reinterpret_cast<void *>(mapping.base);
    void *got =
        mmap(base, mapping.size_bytes, protection_of(mapping), MAP_SHARED | MAP_FIXED, mapping.physical->fd(), 0);
    require(got == base, CUDA_ERROR_OUT_OF_MEMORY);
    keep_from_children(mapping.base, mapping.size_bytes);
}

void AddressSpace::withdraw(const Mapping &mapping) const {
    if (!mapping.physical)
        return;
    void *base = reinterpret_cast<void *>(mapping.base);
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    require(mmap(base, mapping.size_bytes, PROT_NONE, kFlags, -1, 0) == base, CUDA_ERROR_OUT_OF_MEMORY);
    keep_from_children(mapping.base, mapping.size_bytes);
}

void AddressSpace::map(Mapping mapping) {
    std::lock_guard lock(mutex_);
    auto next = mappings_.lower_bound(mapping.base);
    require(next == mappings_.end() || next->first >= mapping.base + mapping.size_bytes);
    if (next != mappings_.begin()) {
        const Mapping &before = std::prev(next)->second;
        require(before.base + before.size_bytes <= mapping.base);
    }
    place(mapping);
    CUdeviceptr base = mapping.base;
    mappings_.emplace(base, std::move(mapping));
    changed();
}

void AddressSpace::unmap_application(CUdeviceptr base, size_t size_bytes) {
    std::lock_guard lock(mutex_);
    auto first = mappings_.lower_bound(base);
    auto last = first;
    CUdeviceptr reached = base;
    while (last != mappings_.end() && last->first == reached && last->second.application_mapped &&
           reached < base + size_bytes) {
        reached += last->second.size_bytes;
        ++last;
    }
    require(reached == base + size_bytes);
    for (auto it = first; it != last; ++it)
        withdraw(it->second);
    mappings_.erase(first, last);
    changed();
}

void AddressSpace::unmap(CUdeviceptr base) {
    std::lock_guard lock(mutex_);
    auto it = mappings_.find(base);
    require(it != mappings_.end());
    withdraw(it->second);
    mappings_.erase(it);
    changed();
}

void AddressSpace::set_access(CUdeviceptr base, size_t size_bytes, const CUmemAccessDesc &description) {
    std::lock_guard lock(mutex_);
    auto first = mappings_.lower_bound(base);
    auto last = first;
    CUdeviceptr reached = base;
    while (last != mappings_.end() && last->first == reached && last->second.application_mapped &&
           reached < base + size_bytes) {
        reached += last->second.size_bytes;
        ++last;
    }
    require(reached == base + size_bytes);
    for (auto it = first; it != last; ++it) {
        Mapping &mapping = it->second;
        bool device = description.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        (device ? mapping.access : mapping.host_access)[description.location.id] = description.flags;
        require(mprotect(reinterpret_cast<void *>(mapping.base), mapping.size_bytes, protection_of(mapping)) == 0,
                CUDA_ERROR_UNKNOWN);
    }
    changed();
}

std::optional<Mapping> AddressSpace::mapping_at(CUdeviceptr address) const {
    std::lock_guard lock(mutex_);
    auto it = mappings_.upper_bound(address);
    if (it == mappings_.begin())
        return std::nullopt;
    --it;
    if (address - it->first >= it->second.size_bytes)
        return std::nullopt;
    return it->second;
}

bool AddressSpace::mapped_in(CUdeviceptr base, size_t size_bytes) const {
    std::lock_guard lock(mutex_);
    auto it = mappings_.lower_bound(base + size_bytes);
    if (it == mappings_.begin())
        return false;
    --it;
    return it->second.base + it->second.size_bytes > base;
}

void AddressSpace::add_allocation(Allocation allocation) {
    std::lock_guard lock(mutex_);
    allocation.buffer_id = next_buffer_id_++;
    allocations_[allocation.base] = std::move(allocation);
}

std::optional<Allocation> AddressSpace::remove_allocation(CUdeviceptr base) {
    std::lock_guard lock(mutex_);
    auto it = allocations_.find(base);
    if (it == allocations_.end())
        return std::nullopt;
    Allocation allocation = std::move(it->second);
    allocations_.erase(it);
    return allocation;
}

std::optional<Allocation> AddressSpace::allocation_at(CUdeviceptr address) const {
    std::lock_guard lock(mutex_);
    auto it = allocations_.upper_bound(address);
    if (it == allocations_.begin())
        return std::nullopt;
    --it;
    if (address - it->first >= it->second.size_bytes)
        return std::nullopt;
    return it->second;
}

std::vector<Allocation> AddressSpace::allocations_of(const Context *context) const {
    std::lock_guard lock(mutex_);
    std::vector<Allocation> chosen;
    for (const auto &[base, allocation] : allocations_) {
        if (allocation.context.lock().get() == context)
            chosen.push_back(allocation);
    }
    return chosen;
}

bool AddressSpace::any_managed() const {
    std::lock_guard lock(mutex_);
    return std::any_of(allocations_.begin(), allocations_.end(),
                       [](const auto &entry) { return entry.second.kind == AllocationKind::kManaged; });
}

bool AddressSpace::any_shared_registration() const {
    std::lock_guard lock(mutex_);
    return std::any_of(allocations_.begin(), allocations_.end(), [](const auto &entry) {
        return entry.second.kind == AllocationKind::kHostRegistered && entry.second.shared;
    });
}

size_t AddressSpace::pool_bytes(int device) const {
    std::lock_guard lock(mutex_);
    size_t total = 0;
    for (const auto &[base, allocation] : allocations_) {
        if (allocation.kind == AllocationKind::kPool && allocation.device == device)
            total += allocation.size_bytes;
    }
    return total;
}

std::shared_ptr<const Spans> AddressSpace::spans() const {
    std::lock_guard lock(mutex_);
    if (spans_ && spans_generation_ == generation_.load())
        return spans_;
    auto fresh = std::make_shared<Spans>();
    for (const auto &[base, mapping] : mappings_) {
        Span span = span_of(mapping);
        if (!fresh->empty() && fresh->back().end == span.begin && fresh->back().readable_by == span.readable_by &&
            fresh->back().writable_by == span.writable_by) {
            fresh->back().end = span.end;
        } else {
            fresh->push_back(span);
        }
    }
    spans_ = std::move(fresh);
    spans_generation_ = generation_.load();
    return spans_;
}

void AddressSpace::detach_all() {
    std::lock_guard lock(mutex_);
    for (const auto &[base, mapping] : mappings_)
        withdraw(mapping);
    changed();
}

void AddressSpace::attach_all() {
    std::lock_guard lock(mutex_);
    for (const auto &[base, mapping] : mappings_)
        place(mapping);
    changed();
}

const Span *span_at(const Spans &spans, std::uint64_t address) {
    auto it = std::upper_bound(spans.begin(), spans.end(), address,
                               [](std::uint64_t value, const Span &span) { return value < span.begin; });
    if (it == spans.begin())
        return nullptr;
    --it;
    return address < it->end ? &*it : nullptr;
}

bool accessible(const Spans &spans, std::uint64_t address, size_t size_bytes, int device, bool write) {
    const Span *span = span_at(spans, address);
    if (span == nullptr)
        return false;
    std::uint64_t bit = std::uint64_t{1} << device;
    // A range may run over spans that lie next to each other with different rights.
    for (std::uint64_t end = address + size_bytes;;) {
        if (((write ? span->writable_by : span->readable_by) & bit) == 0)
            return false;
        if (span->end >= end)
            return true;
        const Span *next = span + 1;
        if (next == spans.data() + spans.size() || next->begin != span->end)
            return false;
        span = next;
    }
}

} // namespace simgpu
