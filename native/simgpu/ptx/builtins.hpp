// The functions that nvcc calls but does not define: printf, assert, malloc and free on the device.
#pragma once

#include "code.hpp"

namespace simgpu::ptx {

/// Throws Unsupported unless the call has the arguments that the function takes.
void check_builtin(const CallSite &site);
void run_builtin(Warp &warp, const Op &op, Mask mask, const CallSite &site);

} // namespace simgpu::ptx
