// See file_queue.hpp. What the ring does not finish in one go (a short transfer, an alignment that the file system
// refuses, an interruption) the calling thread finishes by File's own loops, so both ways end in the same errors.
#include "file_queue.hpp"

#include "error.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace woodfrog::transfer {
namespace {

// In flight for each thread, and how much one request moves: with a few threads more than any disk needs to be busy.
constexpr unsigned depth = 32;
constexpr uint64_t request_bytes = 1 << 20;

// What measured better (docs/measurements.md).
constexpr bool automatic_is_uring = true;

std::atomic<FileIo> &choice() {
    static std::atomic<FileIo> chosen = [] {
        const char *value = std::getenv("WOODFROG_FILE_IO");
        const std::string_view asked = value ? value : "";
        return asked == "uring" ? FileIo::uring : asked == "threads" ? FileIo::threads : FileIo::automatic;
    }();
    return chosen;
}

std::atomic<uint64_t> finished{0};

bool is_left_to_us(int error) {
    return error == EAGAIN || error == EINTR || error == ECANCELED || error == EINVAL || error == EOPNOTSUPP;
}

} // namespace

void choose_file_io(FileIo chosen) {
    choice() = chosen;
}

bool uses_uring() {
    const FileIo chosen = choice();
    return chosen == FileIo::uring || (chosen == FileIo::automatic && automatic_is_uring && !uring_trouble());
}

uint64_t uring_requests() {
    return finished;
}

FileBatch::~FileBatch() {
    while (in_flight_ > 0)
        queue_.finish_one();
}

void FileBatch::write(File &file, const void *data, uint64_t size, uint64_t offset) {
    // The ring's requests are of one kind, and this one is only read from.
    auto *from = static_cast<uint8_t *>(const_cast<void *>(data));
    if (!queue_.is_asynchronous() || file.queueable_descriptor(data, size, offset) < 0) {
        file.write(data, size, offset);
        return;
    }
    for (uint64_t done = 0; done < size; done += request_bytes)
        queue_.begin({this, &file, from + done, offset + done,
                      static_cast<uint32_t>(std::min(request_bytes, size - done)), true});
}

void FileBatch::read(File &file, void *data, uint64_t size, uint64_t offset) {
    auto *to = static_cast<uint8_t *>(data);
    if (!queue_.is_asynchronous() || file.queueable_descriptor(data, size, offset) < 0) {
        try {
            file.read(data, size, offset);
        } catch (const TransferError &) {
            if (!failure_)
                failure_ = std::current_exception();
        }
        return;
    }
    for (uint64_t done = 0; done < size; done += request_bytes)
        queue_.begin({this, &file, to + done, offset + done,
                      static_cast<uint32_t>(std::min(request_bytes, size - done)), false});
}

void FileBatch::wait() {
    while (in_flight_ > 0)
        queue_.finish_one();
    if (failure_)
        std::rethrow_exception(std::exchange(failure_, nullptr));
}

FileQueue::FileQueue() {
    if (!uses_uring())
        return;
    try {
        ring_.emplace(depth);
    } catch (const TransferError &) {
        if (choice() == FileIo::uring)
            throw;
        return; // no descriptor or no memory left for one: slower, no failure
    }
    requests_.resize(depth);
    for (uint32_t tag = depth; tag > 0; tag--)
        free_.push_back(tag - 1);
}

void FileQueue::begin(const Request &request) {
    while (free_.empty())
        finish_one();
    const int fd = request.file->queueable_descriptor(request.data, request.size, request.offset);
    const uint32_t tag = free_.back();
    requests_[tag] = request;
    if (ring_->submit(request.write, fd, request.data, request.size, request.offset, tag)) {
        free_.pop_back();
        request.batch->in_flight_++;
    } else {
        complete(request, -EAGAIN);
    }
}

void FileQueue::finish_one() {
    const Uring::Completion completion = ring_->wait();
    const auto tag = static_cast<uint32_t>(completion.tag);
    const Request request = requests_[tag];
    free_.push_back(tag);
    finished++;
    request.batch->in_flight_--;
    complete(request, completion.result);
}

void FileQueue::complete(const Request &request, int result) {
    if (result == static_cast<int>(request.size) || request.batch->failure_)
        return;
    try {
        if (result < 0 && !is_left_to_us(-result))
            throw_errno(-result, request.write ? "pwrite" : "pread",
                        std::to_string(request.size) + " bytes at offset " + std::to_string(request.offset));
        const auto done = static_cast<uint32_t>(std::max(result, 0));
        if (request.write)
            request.file->write(request.data + done, request.size - done, request.offset + done);
        else
            request.file->read(request.data + done, request.size - done, request.offset + done);
    } catch (...) {
        request.batch->failure_ = std::current_exception();
    }
}

} // namespace woodfrog::transfer
