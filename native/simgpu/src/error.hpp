// The one exception that travels inside the simulated driver. api.hpp turns it into the CUresult of the call;
// it must never leave an extern "C" function.
#pragma once

#include <cuda.h>

namespace simgpu {

struct Error {
    CUresult code;
};

// Throws unless `condition` holds. The usual way to refuse an argument.
inline void require(bool condition, CUresult otherwise = CUDA_ERROR_INVALID_VALUE) {
    if (!condition)
        throw Error{otherwise};
}

} // namespace simgpu
