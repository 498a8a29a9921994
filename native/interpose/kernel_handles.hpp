// Which CUfunction handles are kernels of a library in truth (CUkernel): launches take either, and the driver has
// different questions for each.
#pragma once

#include "driver.hpp"

namespace woodfrog::interpose {

bool is_kernel_handle(CUfunction function);

} // namespace woodfrog::interpose
