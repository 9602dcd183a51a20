/*
 * Relocated data by shared objects: what the loader has written, page for page the same in every process that has the library
 * in the same place, but for pages with pointers to what lies elsewhere.
 *
 * The store remembers the first such range by library and address. Nothing is taken on trust: a page is exchanged where it
 * has the very bytes, and stays where it has others.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "parts.h"

static int is_equal(const uint64_t *a, const uint64_t *b) {
    for (size_t i = 0; i < PAGE / 8; i += 8) {
        uint64_t differ = 0;
        for (size_t j = i; j < i + 8; j++)
            differ |= a[j] ^ b[j];
        if (differ)
            return 0;
    }
    return 1;
}

/* Exchanges the pages of a range that the object has, too; how many. */
static size_t exchange_equal(const struct placed *place, int fd, uint64_t offset) {
    size_t equal = 0, run = 0;
    if (!is_sealed(fd, offset + place->length, NULL))
        return 0;
    long at = CALL6(SYS_mmap, NULL, place->length, PROT_READ, MAP_PRIVATE | MAP_POPULATE, fd, (long)offset);
    if (has_failed(at))
        return 0;
    for (size_t page = 0; page <= place->length; page += PAGE) {
        int is_same = page < place->length &&
                      is_equal((const void *)(place->start + page), (const void *)((uintptr_t)at + page));
        if (is_same) {
            run += PAGE;
            continue;
        }
        if (run) {
            uintptr_t start = place->start + page - run;
            long put = CALL6(SYS_mmap, start, run, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_POPULATE, fd,
                             (long)(offset + page - run));
            equal += put == (long)start ? run / PAGE : 0;
        }
        run = 0;
    }
    CALL3(SYS_munmap, at, place->length, 0);
    return equal;
}

/* Gives the range to the store, and takes the object in its place. */
static void remember(const struct placed *place) {
    char handle[64];
    uint64_t offset;
    int fd = (int)CALL3(SYS_memfd_create, "orc:relocated", MFD_CLOEXEC, 0);
    if (fd < 0)
        return;
    long put = CALL3(SYS_write, fd, place->start, place->length);
    struct exchange exchange = {.body = &place->name, .length = sizeof place->name};
    exchange.files = &fd;
    exchange.file_count = 1;
    exchange.told = handle;
    exchange.room = sizeof handle;
    if (put == (long)place->length && ask_store(&exchange, ASK_REMEMBER, TOLD_HANDLE)) {
        copy(&offset, handle + 32, sizeof offset); /* Behind the name. */
        if (exchange.descriptor_count == 1)
            exchange_equal(place, exchange.descriptors[0], offset);
        for (size_t i = 0; i < exchange.descriptor_count; i++)
            close_file(exchange.descriptors[i]);
    }
    close_file(fd);
}

/* Whether the range is there as the loader leaves it: of a file or an object, private and read-only. */
static int is_settled(const struct placed *place) {
    uintptr_t end = place->start + place->length;
    struct mapping found;
    for (uintptr_t next = place->start; next < end; next = found.end)
        if (!find_mapping(next, &found) || found.start > next || !found.readable || found.writable ||
            found.executable || found.shared)
            return 0;
    return 1;
}

/* Exchanges what is to be had without asking; whether it was of use. */
static int exchange_named(const struct placed *place) {
    const struct name *name = &place->name;
    uint64_t key[KEY_WORDS] = {KEY_RELOCATED, name->key, name->address, name->start, name->length};
    struct entry entry;
    int fd = find_entry(key, &entry) ? open_object(&entry, place->length, NULL) : -1;
    size_t equal = fd >= 0 ? exchange_equal(place, fd, 0) : 0;
    close_file(fd);
    return equal > 0;
}

static void share_some(struct placed *places, size_t count) {
    struct name names[MOST_PIECES];
    struct answer answers[MOST_PIECES];
    struct exchange exchange = {.body = names, .told = answers, .room = sizeof answers};
    size_t next = 0;
    for (size_t i = 0; i < count; i++)
        names[i] = places[i].name;
    exchange.length = count * sizeof *names;
    if (!ask_store(&exchange, ASK_RECALL, TOLD_PIECES) || exchange.told_length != count * sizeof *answers)
        return;
    /* What is remembered comes over the same line: the descriptors at hand must be dealt with before. */
    for (size_t i = 0; i < count; i++) {
        size_t equal = 0;
        if (!answers[i].refusal && next < exchange.descriptor_count)
            equal = exchange_equal(&places[i], exchange.descriptors[next++], answers[i].offset);
        /* Others had other neighbours: what is more like this program's may be of use to the next. */
        answers[i].zero = answers[i].refusal == NOT_FOUND || (!answers[i].refusal && equal == 0);
    }
    for (size_t i = 0; i < exchange.descriptor_count; i++)
        close_file(exchange.descriptors[i]);
    for (size_t i = 0; i < count && !is_left_alone(); i++)
        if (answers[i].zero)
            remember(&places[i]);
}

void share_relocated(void) {
    struct placed places[MOST_PIECES];
    if (!placed_count() || !start_looking())
        return;
    for (size_t i = 0; i < placed_count() && !is_left_alone();) {
        size_t count = 0;
        while (i < placed_count() && count < MOST_PIECES) {
            if (is_settled(placed_at(i))) {
                places[count] = *placed_at(i);
                count += !exchange_named(&places[count]);
                forget_placed(i);
            } else {
                i++;
            }
        }
        if (count)
            share_some(places, count);
    }
    done_looking();
}
