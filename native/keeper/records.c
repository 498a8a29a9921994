// The table behind records.h: an array in order of creation, grown by doubling, bounded by WF_KEEPER_MAX_RECORDS and
// by the limit that main.c derives from RLIMIT_NOFILE. It must never know what a descriptor refers to.
#include "records.h"

#include "keeper.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct Record *table;
static size_t table_count;
static size_t table_capacity;
static size_t held_fds;
static size_t fd_limit;

void records_set_fd_limit(size_t limit) {
    fd_limit = limit;
}

size_t records_count(void) {
    return table_count;
}

struct Record *records_find(const char *key) {
    for (size_t i = 0; i < table_count; i++)
        if (strcmp(table[i].key, key) == 0)
            return &table[i];
    return NULL;
}

struct Record *records_at(uint64_t index) {
    return index < table_count ? &table[index] : NULL;
}

// Makes room for `needed` elements of `size` bytes; the old block stays valid if there is no memory.
static int reserve(void **block, size_t *capacity, size_t needed, size_t size) {
    if (needed <= *capacity)
        return 0;
    size_t wanted = *capacity ? *capacity : 8;
    while (wanted < needed)
        wanted *= 2;
    void *grown = realloc(*block, wanted * size);
    if (!grown)
        return ENOMEM;
    *block = grown;
    *capacity = wanted;
    return 0;
}

int records_append(const char *key, const int *fds, size_t count, uint64_t *total) {
    struct Record *record = records_find(key);
    struct Record fresh = {0};
    if (held_fds + count > fd_limit)
        return EMFILE;
    if (!record) {
        if (table_count >= WF_KEEPER_MAX_RECORDS)
            return ENOSPC;
        if (reserve((void **)&table, &table_capacity, table_count + 1, sizeof(*table)))
            return ENOMEM;
        strncpy(fresh.key, key, sizeof(fresh.key) - 1);
        record = &fresh;
    }
    if (reserve((void **)&record->fds, &record->capacity, record->count + count, sizeof(int)))
        return ENOMEM;
    memcpy(record->fds + record->count, fds, count * sizeof(int));
    record->count += count;
    held_fds += count;
    *total = record->count;
    if (record == &fresh)
        table[table_count++] = fresh;
    return 0;
}

int records_replace(const char *key, uint64_t index, int fd) {
    struct Record *record = records_find(key);
    if (!record)
        return ENOENT;
    if (index >= record->count)
        return EINVAL;
    close(record->fds[index]);
    record->fds[index] = fd;
    return 0;
}

int records_drop(const char *key) {
    struct Record *record = records_find(key);
    if (!record)
        return ENOENT;
    for (size_t i = 0; i < record->count; i++)
        close(record->fds[i]);
    held_fds -= record->count;
    free(record->fds);
    size_t index = (size_t)(record - table);
    memmove(record, record + 1, (table_count - index - 1) * sizeof(*table));
    table_count--;
    return 0;
}
