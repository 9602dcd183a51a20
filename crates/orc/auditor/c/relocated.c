/*
 * Relocated data by shared objects: what the loader has written, page for page the same in every process that has the library
 * in the same place, but for pages with pointers to what is elsewhere. What the store has prepared (prepared.c) the loader did not
 * have to write; what is left are pages with pointers to other libraries, and those of programs that nothing was prepared for.
 *
 * The store remembers the first such range by library and address. Nothing is taken on trust: a page is exchanged where it
 * has the very bytes, and stays where it has others.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "parts.h"

/* With fewer pages of one's own than this it is not worth asking for more. */
#define WORTH_ASKING 8

/* Words that are compared at a time: as many as fit into a register. */
typedef uint64_t words __attribute__((vector_size(16)));

static int is_equal(const words *a, const words *b) {
    for (size_t i = 0; i < PAGE / sizeof *a; i += 16) {
        words differ = {0};
        for (size_t j = i; j < i + 16; j++)
            differ |= a[j] ^ b[j];
        if (differ[0] | differ[1])
            return 0;
    }
    return 1;
}

/* Exchanges those of a run of own pages that the object has, too; how many. `ours` is where the object's same pages are seen, and
   `offset` where they are in it. */
static size_t exchange_run(struct range own, uintptr_t ours, int fd, uint64_t offset) {
    size_t equal = 0, run = 0, length = own.end - own.start;
    for (size_t page = 0; page <= length; page += PAGE) {
        int is_same =
            page < length && is_equal((const void *)(own.start + page), (const void *)(ours + page));
        if (is_same) {
            run += PAGE;
            continue;
        }
        if (run) {
            uintptr_t start = own.start + page - run;
            long put = CALL6(SYS_mmap, start, run, PROT_READ, MAP_PRIVATE | MAP_FIXED | MAP_POPULATE, fd,
                             (long)(offset + page - run));
            equal += put == (long)start ? run / PAGE : 0;
        }
        run = 0;
    }
    return equal;
}

/* Exchanges the program's own pages of a range, from its beginning to `length`, that the object has, too; how many. */
static size_t exchange_equal(const struct placed *place, size_t length, int fd, uint64_t offset) {
    uintptr_t end = place->start + length;
    size_t equal = 0;
    struct range own = own_pages(place->start, end);
    if (own.start == own.end)
        return 0;
    long at = CALL6(SYS_mmap, NULL, length, PROT_READ, MAP_PRIVATE, fd, (long)offset);
    if (has_failed(at))
        return 0;
    for (; own.start < own.end; own = own_pages(own.end, end)) {
        size_t skip = own.start - place->start;
        equal += exchange_run(own, (uintptr_t)at + skip, fd, offset + skip);
    }
    CALL3(SYS_munmap, at, length, 0);
    return equal;
}

/* How many pages of a range are the program's own. */
static size_t count_own(const struct placed *place) {
    uintptr_t end = place->start + place->length;
    size_t count = 0;
    look_at(place->start, end);
    for (struct range own = own_pages(place->start, end); own.start < own.end; own = own_pages(own.end, end))
        count += (own.end - own.start) / PAGE;
    return count;
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
        if (exchange.descriptor_count == 1 &&
            is_sealed(exchange.descriptors[0], offset + place->length, NULL))
            exchange_equal(place, place->length, exchange.descriptors[0], offset);
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

/* Exchanges what is to be had without asking; whether that was of use, or nothing of use is left. */
static int exchange_named(const struct placed *place) {
    const struct name *name = &place->name;
    uint64_t key[KEY_WORDS] = {KEY_RELOCATED, name->key, name->address, name->start, name->length};
    struct entry entry;
    /* A program that was the first to show the library had nothing prepared. Whatever it was prepared for, bytes are compared. */
    int fd = place->is_prepared ? -1 : open_prepared(place, 0, &entry);
    if (fd >= 0)
        exchange_equal(place, entry.value[0], fd, 0);
    close_file(fd);
    if (count_own(place) < WORTH_ASKING)
        return 1;
    fd = find_entry(key, &entry) ? open_object(&entry, place->length, NULL) : -1;
    size_t equal = fd >= 0 ? exchange_equal(place, place->length, fd, 0) : 0;
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
        if (!answers[i].refusal && next < exchange.descriptor_count) {
            int fd = exchange.descriptors[next++];
            if (is_sealed(fd, answers[i].offset + places[i].length, NULL))
                equal = exchange_equal(&places[i], places[i].length, fd, answers[i].offset);
        }
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
}
