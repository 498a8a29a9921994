// What the keeper holds: records, each a key and file descriptors in order. It owns every descriptor handed to it and
// must never read, write or duplicate one; a record disappears only by records_drop.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct Record {
    char key[64];
    int *fds; // owned
    size_t count;
    size_t capacity;
};

size_t records_count(void);

// The most descriptors that all records together may hold; 0 until it is set.
void records_set_fd_limit(size_t limit);

// The record `key`, or NULL.
struct Record *records_find(const char *key);

// The record number `index` in order of creation, or NULL past the end.
struct Record *records_at(uint64_t index);

// Adds `fds` to `key`, a new record if there is none; the keeper owns them from then on. All or nothing:
// 0, or ENOMEM, EMFILE (too many descriptors) or ENOSPC (too many records) with nothing taken.
int records_append(const char *key, const int *fds, size_t count, uint64_t *total);

// Puts `fd` at `index` of `key` and closes the one that was there. 0, ENOENT, or EINVAL with `fd` not taken.
int records_replace(const char *key, uint64_t index, int fd);

// Closes all descriptors of `key` and forgets it. 0 or ENOENT.
int records_drop(const char *key);
