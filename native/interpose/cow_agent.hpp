// Copy-on-write as the agent's messages have it.
#pragma once

#include "cow.hpp"
#include "transport.hpp"

namespace woodfrog::interpose::cow {

// A series of `guard` messages, which arms when it is whole.
class Batches {
  public:
    // Takes one over. After the last one: true, and in `outcome` what to answer: what was there already if that is a
    // refusal, or the first failure.
    bool take(Packet &packet, Outcome *outcome);
    void forget();

  private:
    FdList page_;
    std::vector<wire::Guarded> handles_;
    Outcome failure_;
};

// For the answer to guard_end: as many kernels as a message takes.
std::vector<wire::Kernel> kernels_of(const Report &report, uint64_t *waits);

} // namespace woodfrog::interpose::cow
