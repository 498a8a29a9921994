// From an API call to a stream: which stream a handle means, what new work has to wait for, and whether it runs or is
// captured into a graph.
#pragma once

#include <memory>
#include <vector>

#include <cuda.h>

#include "context.hpp"
#include "stream.hpp"
#include "work.hpp"

namespace simgpu {

HandleTable<Stream> &stream_table();

// 0 and CU_STREAM_LEGACY are the legacy default stream of the current context. Throws CUDA_ERROR_INVALID_HANDLE,
// CUDA_ERROR_INVALID_CONTEXT, or the error that the stream's context has failed with.
std::shared_ptr<Stream> resolve_stream(CUstream handle);

// Appends work to the stream, or a node to the graph that it captures (the ticket is then empty).
Ticket submit(Stream &stream, std::shared_ptr<Work> work, std::vector<Ticket> dependencies = {});

// Appends work, not to be called on a capturing stream, and waits until it is done. Throws the context's failure.
void submit_and_wait(Stream &stream, std::shared_ptr<Work> work);

// Appends work past any capture check; for work that stands for no call of the application.
Ticket enqueue_ordered(Stream &stream, std::shared_ptr<Work> work, std::vector<Ticket> dependencies);

} // namespace simgpu
