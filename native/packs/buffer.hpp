// Page-aligned scratch memory of one thread, as O_DIRECT needs it. Grows and never shrinks; what was in it is lost when
// it grows.
#pragma once
#include "records.hpp"

#include <cstdlib>
#include <memory>
#include <new>

namespace woodfrog::packs {

class Buffer {
  public:
    uint8_t *at_least(uint64_t size) {
        if (size > size_) {
            size_ = 0; // before the old memory goes, in case there is none
            memory_.reset();
            const uint64_t whole = round_up(size, page_bytes);
            void *memory = std::aligned_alloc(page_bytes, whole);
            if (!memory)
                throw std::bad_alloc();
            memory_.reset(static_cast<uint8_t *>(memory));
            size_ = whole;
        }
        return memory_.get();
    }
    uint8_t *data() const { return memory_.get(); }

  private:
    struct Free {
        void operator()(uint8_t *memory) const { std::free(memory); }
    };
    std::unique_ptr<uint8_t, Free> memory_;
    uint64_t size_ = 0;
};

} // namespace woodfrog::packs
