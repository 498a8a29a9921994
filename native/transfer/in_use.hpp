// Keeps an object from being closed while an operation works on it: operations hold a Use, close() takes the object for
// good or says that it is in use. It must never block: the caller of close() decides what to wait for.
#pragma once
#include "error.hpp"

#include <cerrno>
#include <mutex>

namespace woodfrog::transfer {

class InUse {
  public:
    explicit InUse(const char *what) : what_(what) {}

    void enter() {
        std::lock_guard lock(mutex_);
        if (closed_)
            throw TransferError(-EBADF, "", std::string("the ") + what_ + " has been closed");
        if (exclusive_)
            throw_busy();
        users_++;
    }
    void leave() {
        std::lock_guard lock(mutex_);
        users_--;
    }

    // True: the caller closes the object now, nobody will enter again. False: it was closed before.
    bool close() {
        std::lock_guard lock(mutex_);
        if (closed_)
            return false;
        if (users_ > 0 || exclusive_)
            throw_busy();
        closed_ = true;
        return true;
    }

    // Between these two nobody can enter, and nobody is in.
    void begin_exclusive() {
        enter();
        std::lock_guard lock(mutex_);
        users_--;
        if (users_ > 0)
            throw_busy();
        exclusive_ = true;
    }
    void end_exclusive() {
        std::lock_guard lock(mutex_);
        exclusive_ = false;
    }

  private:
    [[noreturn]] void throw_busy() const {
        throw TransferError(-EBUSY, "", std::string("the ") + what_ + " is in use by a transfer");
    }

    const char *what_;
    std::mutex mutex_;
    unsigned users_ = 0;
    bool closed_ = false;
    bool exclusive_ = false;
};

class Use {
  public:
    explicit Use(InUse &state) : state_(&state) { state_->enter(); }
    Use(Use &&other) noexcept : state_(other.state_) { other.state_ = nullptr; }
    Use(const Use &) = delete;
    Use &operator=(const Use &) = delete;
    Use &operator=(Use &&) = delete;
    ~Use() {
        if (state_)
            state_->leave();
    }

  private:
    InUse *state_;
};

class ExclusiveUse {
  public:
    explicit ExclusiveUse(InUse &state) : state_(state) { state_.begin_exclusive(); }
    ExclusiveUse(const ExclusiveUse &) = delete;
    ExclusiveUse &operator=(const ExclusiveUse &) = delete;
    ~ExclusiveUse() { state_.end_exclusive(); }

  private:
    InUse &state_;
};

} // namespace woodfrog::transfer
