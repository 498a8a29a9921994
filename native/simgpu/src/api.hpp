// How every function of the public API is written: a lambda inside call() or call_in_context(), which pass the gate,
// check the state of the process and of the context, and turn exceptions into the CUresult.
#pragma once

#include <memory>
#include <new>
#include <system_error>

#include <cuda.h>

#include "context.hpp"
#include "error.hpp"
#include "process.hpp"

namespace simgpu {

template <class Body> CUresult call(Body &&body) noexcept {
    try {
        ApiCall guard;
        body();
        return CUDA_SUCCESS;
    } catch (const Error &error) {
        return error.code;
    } catch (const std::bad_alloc &) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    } catch (const std::system_error &) { // no more threads
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
}

// `body` gets the calling thread's context, which has not failed.
template <class Body> CUresult call_in_context(Body &&body) noexcept {
    return call([&] {
        std::shared_ptr<Context> context = require_context();
        require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
        body(*context);
    });
}

// Stores through an optional output parameter.
template <class T, class U> void put(T *destination, U &&value) {
    if (destination != nullptr)
        *destination = static_cast<T>(value);
}

} // namespace simgpu
