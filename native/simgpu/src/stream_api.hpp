// What the entry points of streams and events share.
#pragma once

#include <cuda.h>

#include "event.hpp"
#include "stream.hpp"

namespace simgpu {

CUresult api_memory_operations(CUstream handle, unsigned count, const CUstreamBatchMemOpParams *list);
CUresult api_wait_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags, bool is_wide);
CUresult api_write_value(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags, bool is_wide);

// Lets the stream wait for what the event stands for now; during a capture this joins the stream into it.
void wait_event(Stream &stream, const std::shared_ptr<Event> &event, unsigned flags);
void record_event_api(const std::shared_ptr<Event> &event, Stream &stream, unsigned flags);
// What synchronising with the stream waits for: for the legacy default stream, the blocking streams as well.
Ticket last_including_implicit(Stream &stream);

} // namespace simgpu
