// See chunk_runs.hpp.
#include "chunk_runs.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>

namespace woodfrog::transfer {
namespace {

// The slots of the ranges, one after the other.
class Slots {
  public:
    Slots(const char *operation, const std::vector<Range> &ranges, uint64_t chunk_bytes)
        : ranges_(ranges), chunk_bytes_(chunk_bytes) {
        std::vector<Range> sorted = ranges;
        std::ranges::sort(sorted, {}, &Range::offset);
        for (size_t i = 0; i < sorted.size(); i++) {
            if (i > 0 && sorted[i].offset - sorted[i - 1].offset < sorted[i - 1].size)
                throw_invalid(operation, "two ranges share what lies at " + std::to_string(sorted[i].offset));
            count_ += sorted[i].size / chunk_bytes;
        }
    }

    uint64_t count() const { return count_; }

    uint64_t next() {
        while (used_ == ranges_[range_].size / chunk_bytes_) {
            range_++;
            used_ = 0;
        }
        return ranges_[range_].offset + used_++ * chunk_bytes_;
    }

  private:
    const std::vector<Range> &ranges_;
    uint64_t chunk_bytes_;
    uint64_t count_ = 0;
    size_t range_ = 0;
    uint64_t used_ = 0; // of that range
};

std::vector<uint32_t> read_positions(const char *operation, std::string_view positions) {
    std::vector<uint32_t> numbers(positions.size() / sizeof(uint32_t));
    if (positions.size() % sizeof(uint32_t) != 0)
        throw_invalid(operation, std::to_string(positions.size()) + " bytes are no array of u32 positions");
    if (!numbers.empty())
        std::memcpy(numbers.data(), positions.data(), positions.size());
    for (size_t i = 1; i < numbers.size(); i++)
        if (numbers[i] <= numbers[i - 1])
            throw_invalid(operation, "position " + std::to_string(numbers[i]) + " does not come after " +
                                         std::to_string(numbers[i - 1]));
    return numbers;
}

uint64_t chunk_count(const Piece &piece, uint64_t chunk_bytes) {
    return piece.size / chunk_bytes + (piece.size % chunk_bytes != 0);
}

bool follows(const PlacedChunk &chunk, const PlacedChunk &before, uint64_t chunk_bytes) {
    return chunk.place == before.place + chunk_bytes;
}

} // namespace

ChunkPlan plan_chunks(const char *operation, const std::vector<Piece> &pieces, std::string_view positions,
                      const std::vector<Range> &ranges, uint64_t chunk_bytes) {
    check_pieces(operation, pieces);
    const std::vector<uint32_t> numbers = read_positions(operation, positions);
    Slots slots(operation, ranges, chunk_bytes);
    if (numbers.size() > slots.count())
        throw_invalid(operation, std::to_string(numbers.size()) + " chunks do not fit into the ranges' " +
                                     std::to_string(slots.count()) + " slots");
    ChunkPlan plan;
    plan.places.resize(numbers.size() * sizeof(uint64_t));
    std::map<Context *, size_t> device_of;
    size_t piece = 0;
    uint64_t first = 0; // number of that piece's first chunk
    for (size_t i = 0; i < numbers.size(); i++) {
        while (piece < pieces.size() && numbers[i] - first >= chunk_count(pieces[piece], chunk_bytes))
            first += chunk_count(pieces[piece++], chunk_bytes);
        if (piece == pieces.size())
            throw_invalid(operation, "there is no chunk " + std::to_string(numbers[i]) + ": the pieces have " +
                                         std::to_string(first));
        const uint64_t offset = (numbers[i] - first) * chunk_bytes;
        const Memory &memory = *pieces[piece].memory;
        const PlacedChunk chunk{memory.address() + pieces[piece].offset + offset, slots.next(),
                                std::min(chunk_bytes, pieces[piece].size - offset)};
        std::memcpy(plan.places.data() + i * sizeof(uint64_t), &chunk.place, sizeof(uint64_t));
        const auto [found, is_new] = device_of.try_emplace(memory.context().get(), plan.devices.size());
        if (is_new)
            plan.devices.push_back({memory.context(), {}, {}});
        plan.devices[found->second].chunks.push_back(chunk);
        plan.size_bytes += chunk.size;
    }
    for (DeviceChunks &device : plan.devices)
        std::ranges::sort(device.chunks, {}, &PlacedChunk::place); // the ranges may come in any order
    return plan;
}

void find_runs(DeviceChunks &device, uint64_t chunk_bytes, bool gather) {
    const std::vector<PlacedChunk> &chunks = device.chunks;
    device.runs.clear();
    for (size_t i = 0; i < chunks.size();) {
        ChunkRun run{i, 1, chunks[i].size, true};
        while (i + run.count < chunks.size()) {
            const PlacedChunk &chunk = chunks[i + run.count], &before = chunks[i + run.count - 1];
            if (!follows(chunk, before, chunk_bytes) || before.size != chunk_bytes ||
                chunk.address != before.address + chunk_bytes)
                break;
            run.count++;
            run.size += chunk.size;
        }
        i += run.count;
        // Short runs whose slots follow each other become one that is gathered.
        if (gather && run.size < direct_run_bytes && !device.runs.empty()) {
            ChunkRun &last = device.runs.back();
            if ((!last.direct || last.size < direct_run_bytes) &&
                follows(chunks[run.first], chunks[run.first - 1], chunk_bytes)) {
                last = {last.first, last.count + run.count, (last.count * chunk_bytes) + run.size, false};
                continue;
            }
        }
        device.runs.push_back(run);
    }
}

} // namespace woodfrog::transfer
