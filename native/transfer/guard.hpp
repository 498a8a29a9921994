// Which memory of a running target's snapshot is captured already, shared with the target (native/wire/guard.h).
//
// The daemon's own account of it is here; the page is only how the target asks and is answered. Each chunk that has to
// be captured is handed out once, in runs, to whoever takes the next or what the target waits for; it is the caller's
// to capture it and to say so. Nothing here touches GPU memory.
#pragma once
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

struct GuardPage;

namespace woodfrog::transfer {

class Guard {
  public:
    // Pieces of memory, each cut into chunks, of which those at `positions` (u32, ascending, counted through the
    // pieces) have to be captured.
    struct Part {
        std::vector<uint64_t> sizes;
        std::string_view positions;
    };
    // Chunks first … first+count-1 of a part's positions, which are what is to be captured of units [unit, unit+units).
    struct Run {
        uint64_t first, count;
        uint32_t unit, units;
    };
    struct Place {
        uint32_t first, count;
    };

    Guard(const std::vector<Part> &parts, uint64_t chunk_bytes);
    Guard(const Guard &) = delete;
    Guard &operator=(const Guard &) = delete;
    ~Guard();

    int fd() const { return fd_; } // stays this object's
    uint64_t unit_bytes() const { return unit_bytes_; }
    // The units of each piece of a part.
    const std::vector<Place> &places(size_t part) const { return part_at(part).places; }

    // What nobody has taken yet, in the order of the memory: runs of at most `most_chunks` chunks together, but at
    // least a unit; none when all is taken.
    std::vector<Run> take(size_t part, uint64_t most_chunks);
    // The same of what the target waits for; waits until there is some. None when it is over.
    std::vector<Run> take_wanted(size_t part, uint64_t most_chunks);
    // These runs are captured: the target may write there.
    void captured(size_t part, const std::vector<Run> &runs);
    // Chunks that are not captured yet, taken or not.
    uint64_t left(size_t part) const;
    // Nobody waits any more, whatever is captured.
    void finish();
    bool over() const;

    // As the target says.
    uint64_t waits() const;
    uint64_t waited_ns() const;
    uint32_t given_up() const;

  private:
    enum class State : uint8_t { free, kept, taken };
    struct PartState {
        std::vector<Place> places;
        uint32_t first_unit = 0, end_unit = 0;
        uint32_t next = 0; // no unit below it is `kept`
        uint64_t left = 0;
    };
    PartState &part_at(size_t part);
    const PartState &part_at(size_t part) const { return const_cast<Guard *>(this)->part_at(part); }
    template <typename Wanted>
    std::vector<Run> collect(PartState &part, uint32_t from, uint64_t most_chunks, Wanted wanted);
    uint32_t *state_of(uint32_t unit) const;

    mutable std::mutex mutex_;
    uint64_t unit_bytes_ = 0;
    uint32_t units_ = 0;
    int fd_ = -1;
    uint64_t mapped_bytes_ = 0;
    GuardPage *page_ = nullptr;
    std::vector<PartState> parts_;
    std::vector<State> states_;
    std::vector<uint64_t> first_chunk_; // of each unit, and one more; counted through its part's positions
};

} // namespace woodfrog::transfer
