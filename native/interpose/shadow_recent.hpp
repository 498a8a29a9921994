// What each thread has launched lately, so that a launch which is made again byte for byte costs no record: a loop of
// inference or training makes the same few hundred launches over and over. Per thread; nothing here takes a lock or
// writes what other threads write, once a thread has its table.
//
// Everything in it holds for one count of changes() only: what a launch may write depends on its bytes, on what is
// owned and on the code, and it is to be told once for each report.
#pragma once

#include "changes.hpp"
#include "shadow_records.hpp"

namespace woodfrog::interpose::shadow {

class Recent {
  public:
    static constexpr size_t kLargestRecord = 240; // larger launches are recorded each time

    // A function and what launching it needs, of one thread. The counts are added to the kernel's at a report.
    struct Known {
        CUfunction function;
        uint64_t changes;
        std::atomic<Kernel *> kernel;
        bool has_template;
        std::atomic<uint64_t> launches, covered; // written by the thread, taken by whoever reports
    };

    // The calling thread's, inside the gate. Null when there is no memory for one.
    static Recent *of_this_thread();
    // Adds all threads' counts to kernels and counts().
    static void add_counts();

    // The entry of a function; null when its kernel is not known. `now` is the count of changes.
    Known *find(CUfunction function, uint64_t now);

    // Whether the launch was recorded under this count of changes; if not, `add` notes it once it is recorded. The
    // record's bytes from its size to the next multiple of 8 must be zero.
    bool has(const unsigned char *record, size_t size_bytes, uint64_t now);
    void add(const unsigned char *record, size_t size_bytes, uint64_t now);

  private:
    // 8192 launches: one that makes more between two equal ones, in turn, would find none of them. A step of a compiled
    // model makes 3184. What is not used is not touched, so that it has no memory.
    static constexpr size_t kFunctions = 256, kSets = 2048, kWays = 4;
    static constexpr unsigned kSetShift = 53; // the high bits of a hash; the tag is of the next 32
    static_assert(kSets == uint64_t{1} << (64 - kSetShift));

    struct Slot {
        uint64_t changes;
        uint64_t size_bytes;
        unsigned char record[kLargestRecord];
    };

    static void add_counts_of(Known &known);

    Known functions_[kFunctions];
    uint64_t hash_; // of the record last looked for
    uint32_t tags_[kSets][kWays];
    uint8_t oldest_[kSets];
    Slot slots_[kSets][kWays];
    Recent *next_;
};

} // namespace woodfrog::interpose::shadow
