// Reads and writes of files by one thread, several in flight where the file is read or written past the page cache and
// the kernel has io_uring for us; else each is done where it is asked for. The caller sees no difference but time.
#pragma once
#include "file.hpp"
#include "uring.hpp"

#include <cstdint>
#include <exception>
#include <optional>
#include <vector>

namespace woodfrog::transfer {

// By what: what measured better where it can be had (docs/measurements.md), or the one that was asked for.
enum class FileIo { automatic, uring, threads };

// For all queues made afterwards, in this process. The environment variable WOODFROG_FILE_IO (uring, threads) says it
// at the start. With `uring` a queue that cannot have a ring throws instead of doing without.
void choose_file_io(FileIo choice);
bool uses_uring(); // whether queues made now would, if each can have a ring

// How many requests rings of this process have finished.
uint64_t uring_requests();

class FileQueue;

// Requests that are waited for together. What they read into or write from must stay as it is until `wait` has returned
// or this is gone; the destructor waits too. Used by the queue's thread only.
class FileBatch {
  public:
    explicit FileBatch(FileQueue &queue) : queue_(queue) {}
    FileBatch(const FileBatch &) = delete;
    FileBatch &operator=(const FileBatch &) = delete;
    ~FileBatch();

    void write(File &file, const void *data, uint64_t size, uint64_t offset);
    void read(File &file, void *data, uint64_t size, uint64_t offset);

    // All of them are done; throws the first failure (of File::write and File::read). Empty, and as new, afterwards.
    void wait();

  private:
    friend class FileQueue;
    FileQueue &queue_;
    unsigned in_flight_ = 0;
    std::exception_ptr failure_;
};

// One thread's at a time. Must outlive its batches.
class FileQueue {
  public:
    FileQueue();
    FileQueue(const FileQueue &) = delete;
    FileQueue &operator=(const FileQueue &) = delete;

    // Whether anything is ever in flight.
    bool is_asynchronous() const { return ring_.has_value(); }

  private:
    friend class FileBatch;

    struct Request {
        FileBatch *batch;
        File *file;
        uint8_t *data;
        uint64_t offset;
        uint32_t size;
        bool write;
    };

    void begin(const Request &request);
    void finish_one();
    static void complete(const Request &request, int result);

    std::optional<Uring> ring_;
    std::vector<Request> requests_; // by tag
    std::vector<uint32_t> free_;    // tags
};

} // namespace woodfrog::transfer
