// See thread.hpp.
#include "thread.hpp"

#include <csignal>
#include <pthread.h>

namespace woodfrog::interpose {

int start_thread(const char *name, void *(*body)(void *), void *argument, size_t stack_bytes) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // inherited by the new thread
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack_bytes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const int error = pthread_create(&thread, &attributes, body, argument);
    if (error == 0)
        pthread_setname_np(thread, name);
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return error;
}

} // namespace woodfrog::interpose
