// See submit.hpp.
#include "submit.hpp"

#include <map>

#include "capture.hpp"

namespace simgpu {
namespace {

struct PerThreadStreams {
    std::map<unsigned long long, std::shared_ptr<Stream>> by_context;
    ~PerThreadStreams() {
        for (auto &[id, stream] : by_context)
            stream->retire();
    }
};

std::shared_ptr<Stream> per_thread_stream(const std::shared_ptr<Context> &context) {
    thread_local PerThreadStreams streams;
    auto &stream = streams.by_context[context->id];
    if (!stream) {
        stream = std::make_shared<Stream>(context, Stream::Kind::kPerThreadDefault, 0u, 0);
        context->add_stream(stream);
    }
    return stream;
}

} // namespace

HandleTable<Stream> &stream_table() {
    static auto *table = new HandleTable<Stream>;
    return *table;
}

std::shared_ptr<Stream> resolve_stream(CUstream handle) {
    std::shared_ptr<Stream> stream;
    if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        auto context = require_context();
        stream = handle == CU_STREAM_PER_THREAD ? per_thread_stream(context) : context->legacy_stream();
    } else {
        stream = stream_table().get(handle);
    }
    auto context = stream->context();
    require(context && context->alive.load(), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    require(context->failure.load() == CUDA_SUCCESS, context->failure.load());
    return stream;
}

Ticket enqueue_ordered(Stream &stream, std::shared_ptr<Work> work, std::vector<Ticket> dependencies) {
    auto context = stream.context();
    require(context != nullptr, CUDA_ERROR_CONTEXT_IS_DESTROYED);
    std::lock_guard lock(context->submit_mutex);
    if (stream.kind() == Stream::Kind::kLegacyDefault) {
        for (const auto &other : context->streams()) {
            if (other->blocking())
                dependencies.push_back(other->last());
        }
    } else if (stream.blocking()) {
        dependencies.push_back(context->legacy_stream()->last());
    }
    return stream.enqueue(std::move(work), std::move(dependencies));
}

Ticket submit(Stream &stream, std::shared_ptr<Work> work, std::vector<Ticket> dependencies) {
    if (capture_node(stream, work))
        return {};
    return enqueue_ordered(stream, std::move(work), std::move(dependencies));
}

void submit_and_wait(Stream &stream, std::shared_ptr<Work> work) {
    auto context = stream.context();
    submit(stream, std::move(work)).wait();
    require(!context || context->failure.load() == CUDA_SUCCESS, context ? context->failure.load() : CUDA_SUCCESS);
}

} // namespace simgpu
