// woodfrog-keeper: holds file descriptors for the node daemon and starts the daemon again when it dies.
//
//     woodfrog-keeper [--socket PATH] [--restart-limit N] [--restart-window SECONDS] [--] [daemon argv…]
//
// An exported allocation's descriptor keeps GPU memory alive with its contents, with no CUDA anywhere; so whatever the
// daemon has put here survives it. The messages are in native/wire/keeper.h. The keeper must never look into what it
// holds, never drop a record unless told to, and never leave while it holds one, except by SIGKILL.
//
// One keeper per directory of the socket (a lock on keeper.lock there). It serves its owner and root only.
// Exit status: 0 after `stop` or SIGTERM, 2 usage, 75 another keeper serves this directory, 1 anything else.
#include "keeper.h"
#include "records.h"
#include "supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define EXIT_LOCKED 75       // sysexits.h: EX_TEMPFAIL
#define SCM_MAX_FD_COUNT 253 // include/net/scm.h: SCM_MAX_FD, the most one packet can carry

#define FD_RESERVE 300      // for one packet's descriptors and our own: a full table must still take a connection
#define ACCEPT_PAUSE_MS 100 // when the system has no descriptor left for a connection

#define COMMAND(name, value) WF_##name = value,
enum { WF_KEEPER_COMMANDS(COMMAND) };

struct rlimit original_fd_limit;

static struct Supervisor supervisor = {.limit = 5, .window_s = 60};
static bool terminating; // SIGTERM came: leave as soon as nothing is held
static bool stopping;    // `stop` was accepted: leave now

static void fail(const char *what) {
    fprintf(stderr, "woodfrog-keeper: %s: %s\n", what, strerror(errno));
    exit(1);
}

// ---- one request -------------------------------------------------------------------------------------------------

static bool key_is_valid(const char *key) {
    size_t length = strnlen(key, sizeof(((struct KeeperMessage *)0)->key));
    if (length == 0 || length == sizeof(((struct KeeperMessage *)0)->key))
        return false;
    for (size_t i = 0; i < length; i++) {
        char c = key[i];
        bool alphanumeric = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
        if (!alphanumeric && !strchr("._:@/-", c))
            return false;
    }
    return true;
}

// Fills `reply` (status, total, key) and, for fetch, *out and *out_count (borrowed). `fds` not taken are closed here.
static void answer(const struct KeeperMessage *request, int *fds, size_t fd_count, struct KeeperMessage *reply,
                   const int **out, size_t *out_count) {
    size_t taken = 0;
    struct Record *record;
    bool needs_key = request->command != WF_list && request->command != WF_stop && request->command != WF_ping;
    bool well_formed = request->magic == WF_KEEPER_MAGIC && request->version == WF_KEEPER_VERSION &&
                       request->status == 0 && request->fd_count == fd_count && fd_count <= WF_KEEPER_MAX_FDS &&
                       (!needs_key || key_is_valid(request->key));
    if (!well_formed)
        reply->status = EBADMSG;
    else if (request->command == WF_append ? fd_count == 0 : fd_count != (request->command == WF_replace ? 1u : 0u))
        reply->status = EINVAL;
    else
        switch (request->command) {
        case WF_append:
            reply->status = records_append(request->key, fds, fd_count, &reply->total);
            taken = reply->status == 0 ? fd_count : 0;
            break;
        case WF_fetch:
            if (!(record = records_find(request->key)))
                reply->status = ENOENT;
            else if (request->first > record->count)
                reply->status = EINVAL;
            else {
                size_t rest = record->count - (size_t)request->first;
                *out = record->fds + request->first;
                *out_count = rest < WF_KEEPER_MAX_FDS ? rest : WF_KEEPER_MAX_FDS;
                reply->total = record->count;
            }
            break;
        case WF_drop:
            reply->status = records_drop(request->key);
            break;
        case WF_list:
            if (!(record = records_at(request->first)))
                reply->status = ENOENT;
            else {
                memcpy(reply->key, record->key, sizeof(reply->key));
                reply->total = record->count;
            }
            break;
        case WF_replace:
            reply->status = records_replace(request->key, request->first, fds[0]);
            taken = reply->status == 0 ? 1 : 0;
            break;
        case WF_stop:
            if (records_count() > 0)
                reply->status = EBUSY;
            else
                stopping = true;
            break;
        case WF_ping:
            reply->total = records_count();
            break;
        default:
            reply->status = EOPNOTSUPP;
        }
    for (size_t i = taken; i < fd_count; i++)
        close(fds[i]);
}

// One packet to the client, with descriptors. A client that does not read its replies is not waited for: false.
static bool send_reply(int client, struct KeeperMessage *reply, const int *fds, size_t fd_count) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * WF_KEEPER_MAX_FDS)];
        struct cmsghdr align;
    } control = {0};
    reply->fd_count = (uint32_t)fd_count;
    struct iovec part = {reply, sizeof(*reply)};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
        memcpy(CMSG_DATA(header), fds, sizeof(int) * fd_count);
    }
    if (sendmsg(client, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof(*reply))
        return true;
    if (fd_count == 0)
        return false;
    reply->status = errno; // ETOOMANYREFS: too many descriptors under way; the client reads some and asks again
    return send_reply(client, reply, NULL, 0);
}

// Serves one packet of the client. False: the connection is over.
static bool serve(int client) {
    union {
        char bytes[CMSG_SPACE(sizeof(int) * SCM_MAX_FD_COUNT)];
        struct cmsghdr align;
    } control;
    struct KeeperMessage request;
    int fds[SCM_MAX_FD_COUNT];
    size_t fd_count = 0;
    struct iovec part = {&request, sizeof(request)};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof(control.bytes)};

    ssize_t size = recvmsg(client, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0)
        return errno == EAGAIN || errno == EINTR;
    for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h)) {
        if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
            continue;
        size_t count = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int); // one header at most, of at most SCM_MAX_FD
        memcpy(fds + fd_count, CMSG_DATA(h), count * sizeof(int));
        fd_count += count;
    }
    if (size == 0 && fd_count == 0)
        return false;

    struct KeeperMessage reply = {.magic = WF_KEEPER_MAGIC, .version = WF_KEEPER_VERSION};
    bool whole = size == (ssize_t)sizeof(request) && !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
    if (!whole) { // too short, too long, or our descriptor table is full (MSG_CTRUNC): nothing of it is kept
        for (size_t i = 0; i < fd_count; i++)
            close(fds[i]);
        reply.command = size >= 8 ? request.command : 0;
        reply.status = message.msg_flags & MSG_CTRUNC ? EMFILE : EBADMSG;
        return send_reply(client, &reply, NULL, 0);
    }
    const int *out = NULL;
    size_t out_count = 0;
    reply.command = request.command;
    reply.first = request.first;
    memcpy(reply.key, request.key, sizeof(reply.key));
    reply.key[sizeof(reply.key) - 1] = 0;
    answer(&request, fds, fd_count, &reply, &out, &out_count);
    return send_reply(client, &reply, out, out_count);
}

// ---- set-up ------------------------------------------------------------------------------------------------------

static void make_directory(const char *directory) {
    struct stat info;
    if (mkdir(directory, 0700) != 0 && errno != EEXIST)
        fail(directory);
    if (lstat(directory, &info) != 0)
        fail(directory);
    if (!S_ISDIR(info.st_mode) || info.st_uid != geteuid() || (info.st_mode & 077)) {
        fprintf(stderr, "woodfrog-keeper: %s must be a directory of its user with mode 0700\n", directory);
        exit(1);
    }
}

// The lock lives as long as this process. Children do not inherit it (O_CLOEXEC).
static void take_lock(const char *directory) {
    char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 16];
    snprintf(path, sizeof(path), "%s/keeper.lock", directory);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        fail(path);
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        if (errno != EWOULDBLOCK)
            fail(path);
        fprintf(stderr, "woodfrog-keeper: another keeper serves %s\n", directory);
        exit(EXIT_LOCKED);
    }
}

static int make_listener(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path)); // its length was checked with the arguments
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        fail("socket");
    unlink(path); // a dead keeper's: we hold the lock
    umask(0077);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) != 0 || listen(fd, 16) != 0)
        fail(path);
    return fd;
}

static int accept_owner(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd < 0) {
        if (errno != EAGAIN && errno != ECONNABORTED && errno != EINTR)
            poll(NULL, 0, ACCEPT_PAUSE_MS);
        return -1;
    }
    struct ucred peer = {.uid = (uid_t)-1};
    socklen_t size = sizeof(peer);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && (peer.uid == geteuid() || peer.uid == 0))
        return fd;
    fprintf(stderr, "woodfrog-keeper: refused a connection of user %u\n", (unsigned)peer.uid);
    close(fd);
    return -1;
}

static int make_signalfd(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGTERM);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGCHLD);
    signal(SIGHUP, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    int fd = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
    if (fd < 0)
        fail("signalfd");
    return fd;
}

static void take_signals(int fd) {
    struct signalfd_siginfo info;
    while (read(fd, &info, sizeof(info)) == (ssize_t)sizeof(info)) {
        if (info.ssi_signo == SIGCHLD)
            continue;
        terminating = true;
        supervisor.ended = true;
        if (supervisor.pid)
            kill(supervisor.pid, SIGTERM);
        if (records_count() > 0)
            fprintf(stderr, "woodfrog-keeper: %zu records are held: staying until they are dropped\n", records_count());
    }
    supervisor_reap(&supervisor); // several SIGCHLD may have become one
}

static void run(int signals, int listener) {
    int client = -1;
    while (!stopping && !(terminating && records_count() == 0 && supervisor.pid == 0)) {
        int timeout_ms = supervisor_poll(&supervisor);
        struct pollfd files[2] = {{signals, POLLIN, 0}, {client >= 0 ? client : listener, POLLIN, 0}};
        if (poll(files, 2, timeout_ms) < 0 && errno != EINTR)
            fail("poll");
        if (files[0].revents)
            take_signals(signals);
        if (!files[1].revents)
            continue;
        if (client < 0)
            client = accept_owner(listener);
        else if (!serve(client)) {
            close(client);
            client = -1;
        }
    }
}

static void usage(void) {
    fprintf(stderr, "usage: woodfrog-keeper [--socket PATH] [--restart-limit N] [--restart-window SECONDS] "
                    "[--] [daemon argv...]\n");
    exit(2);
}

// ARCHITECTURE.md, "Processes": the runtime directory.
static void default_socket(char *path, size_t size) {
    const char *own = getenv("WOODFROG_RUNTIME_DIR"), *session = getenv("XDG_RUNTIME_DIR");
    int length;
    if (own && *own)
        length = snprintf(path, size, "%s/keeper.sock", own);
    else if (session && *session)
        length = snprintf(path, size, "%s/woodfrog/keeper.sock", session);
    else if (geteuid() == 0)
        length = snprintf(path, size, "/run/woodfrog/keeper.sock");
    else
        length = snprintf(path, size, "/tmp/woodfrog-%u/keeper.sock", (unsigned)geteuid());
    if (length < 0 || (size_t)length >= size)
        usage();
}

int main(int argc, char **argv) {
    char path[sizeof(((struct sockaddr_un *)0)->sun_path)] = "";
    int next = 1;
    for (; next < argc && argv[next][0] == '-'; next += 2) {
        if (strcmp(argv[next], "--") == 0) {
            next++;
            break;
        }
        if (next + 1 >= argc)
            usage();
        const char *value = argv[next + 1];
        if (strcmp(argv[next], "--socket") == 0 && strlen(value) < sizeof(path))
            strcpy(path, value);
        else if (strcmp(argv[next], "--restart-limit") == 0)
            supervisor.limit = (unsigned)atoi(value);
        else if (strcmp(argv[next], "--restart-window") == 0)
            supervisor.window_s = atof(value);
        else
            usage();
    }
    if (supervisor.limit < 1 || supervisor.limit > SUPERVISOR_MAX_LIMIT || !(supervisor.window_s >= 0))
        usage();
    if (!*path)
        default_socket(path, sizeof(path));
    if (next < argc)
        supervisor.argv = argv + next;

    char directory[sizeof(path)];
    strcpy(directory, path);
    char *slash = strrchr(directory, '/');
    if (!slash || slash == directory) {
        fprintf(stderr, "woodfrog-keeper: the socket needs a directory of its own: %s\n", path);
        return 2;
    }
    *slash = 0;

    setsid(); // fails harmlessly when whoever started us already gave us a session
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    getrlimit(RLIMIT_NOFILE, &original_fd_limit);
    struct rlimit wanted = {original_fd_limit.rlim_max, original_fd_limit.rlim_max};
    setrlimit(RLIMIT_NOFILE, &wanted);
    records_set_fd_limit(wanted.rlim_cur > FD_RESERVE ? wanted.rlim_cur - FD_RESERVE : 0);
    make_directory(directory);
    take_lock(directory);
    int listener = make_listener(path); // before the daemon starts: it can connect at once
    run(make_signalfd(), listener);
    unlink(path);
    return 0;
}
