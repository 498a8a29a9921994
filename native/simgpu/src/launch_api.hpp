// What the entry points of launches share.
#pragma once

#include <cuda.h>

namespace simgpu {

CUresult api_launch(CUfunction function, const unsigned grid[3], const unsigned block[3], unsigned shared_bytes,
                    CUstream stream, void **parameters, void **extra, bool cooperative);
CUresult api_launch_config(const CUlaunchConfig *config, CUstream stream, CUfunction function, void **parameters,
                           void **extra);

} // namespace simgpu
