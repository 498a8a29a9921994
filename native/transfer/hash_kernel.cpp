// See hash_kernel.hpp. A batch is one launch (two, if chunks are larger than tiles); two batches are in flight, each
// with buffers and a stream of its own, so that the end of one overlaps with the beginning of the next.
#include "hash_kernel.hpp"

#include "context.hpp"
#include "hash_buffers.hpp"

#include <algorithm>
#include <bit>
#include <memory>
#include <string>

namespace woodfrog::transfer {
namespace {

using kernels::HashRow;

// Where a run of digests of a batch goes in the result.
struct Target {
    uint64_t first_chunk;
    uint32_t count;
};

struct Batch {
    std::vector<HashRow> rows;
    std::vector<Target> targets; // as many as rows, in their order
    uint32_t tiles = 0;
    uint32_t chunks = 0;
    uint64_t size_bytes = 0;
};

// Takes batches off a list of parts, in order; a large part is divided between chunks.
class Planner {
  public:
    Planner(const std::vector<HashPart> &parts, uint64_t chunk_bytes, uint64_t tile_bytes)
        : parts_(parts), chunk_bytes_(chunk_bytes), tile_bytes_(tile_bytes) {}

    bool empty() const { return part_ == parts_.size(); }

    Batch next() {
        Batch batch;
        while (!empty() && batch.rows.size() < hash_batch_rows) {
            const HashPart &part = parts_[part_];
            const uint64_t room = std::min<uint64_t>(hash_batch_chunks - batch.chunks,
                                                     (hash_batch_bytes - batch.size_bytes) / chunk_bytes_);
            if (room == 0)
                break;
            const uint64_t here = std::min(part.size - done_, room * chunk_bytes_);
            const auto chunks = static_cast<uint32_t>((here - 1) / chunk_bytes_ + 1);
            batch.rows.push_back({part.address + done_, here, batch.tiles, batch.chunks});
            batch.targets.push_back({part.first_chunk + done_ / chunk_bytes_, chunks});
            batch.tiles += static_cast<uint32_t>((here - 1) / tile_bytes_ + 1);
            batch.chunks += chunks;
            batch.size_bytes += here;
            done_ += here;
            if (done_ == part.size) {
                part_++;
                done_ = 0;
            }
        }
        return batch;
    }

  private:
    const std::vector<HashPart> &parts_;
    uint64_t chunk_bytes_, tile_bytes_;
    size_t part_ = 0;
    uint64_t done_ = 0; // of that part
};

class Run {
  public:
    Run(const Context &context, const HashVariant &variant, uint64_t chunk_bytes, DigestList &digests,
        Progress &progress)
        : context_(context), digests_(digests), progress_(progress),
          hash_(context.kernels().function((std::string("woodfrog_hash_") + variant.name).c_str())),
          join_(context.kernels().function("woodfrog_join_tiles")), threads_(variant.threads),
          tile_log2_(static_cast<uint32_t>(std::countr_zero(variant.threads))),
          chunk_log2_(static_cast<uint32_t>(std::countr_zero(chunk_bytes / 1024))),
          buffers_(context.kernels().take_buffers()) {
        // A staged kernel has its leaves in shared memory and wants all of it, a direct one reads them through the
        // cache. A preference, which the driver may refuse.
        const bool staged = std::string(variant.name).find("staged") != std::string::npos;
        Current current(context);
        WF_TRY_CUDA(cuFuncSetAttribute, hash_, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                    staged ? int{CU_SHAREDMEM_CARVEOUT_MAX_SHARED} : int{CU_SHAREDMEM_CARVEOUT_DEFAULT});
        if (!buffers_)
            buffers_ = std::make_unique<HashBuffers>(context);
    }
    Run(const Run &) = delete;
    Run &operator=(const Run &) = delete;
    ~Run() {
        // After a failure kernels may still be at work on the buffers: then they go, and their streams wait.
        if (finished_)
            context_.kernels().keep_buffers(std::move(buffers_));
    }

    void start(unsigned set, Batch batch) {
        HashBuffers::Set &buffers = buffers_->sets[set];
        Batch &mine = batches_[set] = std::move(batch);
        const size_t table_bytes = mine.rows.size() * sizeof(HashRow);
        std::memcpy(buffers.rows_host.data(), mine.rows.data(), table_bytes);
        CUdeviceptr rows = buffers.rows_host.address();
        if (buffers.rows.place() == KernelMemory::Place::device) {
            Current current(context_);
            rows = buffers.rows.address();
            WF_CUDA(cuMemcpyHtoDAsync, rows, static_cast<const void *>(buffers.rows_host.data()), table_bytes,
                    buffers.stream.stream());
        }
        auto row_count = static_cast<uint32_t>(mine.rows.size());
        CUdeviceptr tiles = buffers.tiles.address(), digests = buffers.digests.address();
        void *hash_arguments[] = {&rows, &row_count, &chunk_log2_, &tiles, &digests};
        buffers.stream.launch(hash_, mine.tiles, 1, threads_, hash_arguments);
        if (chunk_log2_ > tile_log2_) {
            void *join_arguments[] = {&rows, &row_count, &chunk_log2_, &tile_log2_, &tiles, &digests};
            buffers.stream.launch(join_, mine.chunks, 1, kernels::join_threads, join_arguments);
        }
        buffers.stream.record();
    }

    void finish(unsigned set) {
        HashBuffers::Set &buffers = buffers_->sets[set];
        Batch &mine = batches_[set];
        if (mine.rows.empty())
            return;
        buffers.stream.wait();
        const uint8_t *from = buffers.digests.data();
        for (const Target &target : mine.targets) {
            digests_.set_many(target.first_chunk, from, target.count);
            from += target.count * HashBuffers::digest_bytes;
        }
        progress_.add(mine.size_bytes);
        mine = {};
    }

    void all_finished() { finished_ = true; }

  private:
    const Context &context_;
    DigestList &digests_;
    Progress &progress_;
    CUfunction hash_, join_;
    unsigned threads_;
    uint32_t tile_log2_, chunk_log2_; // in leaves
    std::unique_ptr<HashBuffers> buffers_;
    Batch batches_[2];
    bool finished_ = false;
};

} // namespace

void hash_by_kernel(const Context &context, const HashVariant &variant, const std::vector<HashPart> &parts,
                    uint64_t chunk_bytes, DigestList &digests, Progress &progress) {
    Planner planner(parts, chunk_bytes, uint64_t{variant.threads} * 1024);
    uint64_t total = 0;
    for (const HashPart &part : parts)
        total += part.size;
    progress.check();
    Run run(context, variant, chunk_bytes, digests, progress);
    unsigned set = 0;
    run.start(set, planner.next());
    progress.begin(total); // from here on it is this function that hashes: memory was enough for the first launch
    for (set ^= 1; !planner.empty(); set ^= 1) {
        progress.check();
        run.finish(set);
        run.start(set, planner.next());
    }
    run.finish(set);
    run.finish(set ^ 1);
    run.all_finished();
}

} // namespace woodfrog::transfer
