/*
 * What the kernel says of the program's memory: which files are mapped where (PROCMAP_QUERY on /proc/self/maps, Linux
 * 6.11, else its text), and which pages are the program's own copies (PAGEMAP_SCAN on /proc/self/pagemap, Linux 6.7, else its
 * entries). The calls are five times cheaper than the text.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/ioctl.h>

#include "parts.h"

/* proc(5), <linux/fs.h>; defined here as build machines may have older headers. */
struct procmap_query {
    uint64_t size, flags, address;
    uint64_t start, end, vma_flags, page_size, offset, inode;
    uint32_t major, minor, name_size, build_id_size;
    uint64_t name, build_id;
};
#define PROCMAP_QUERY _IOWR('f', 17, struct procmap_query)
#define QUERY_READABLE 1u
#define QUERY_WRITABLE 2u
#define QUERY_EXECUTABLE 4u
#define QUERY_SHARED 8u
#define QUERY_COVERING_OR_NEXT 0x10u
#define QUERY_FILE 0x20u

struct page_region {
    uint64_t start, end, categories;
};

struct pagemap_scan {
    uint64_t size, flags, start, end, walk_end, vector, vector_length, most_pages;
    uint64_t inverted, all, any, returned;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pagemap_scan)
#define IS_FILE 4u
#define IS_PRESENT 8u
#define IS_SWAPPED 16u

/* More runs of own pages than a file's segments have, as a rule. */
#define MOST_RUNS 16

static int maps = -1, pagemap = -1;
/* What was looked at, and the runs of own pages in it. */
static struct range looked_at;
static struct page_region runs[MOST_RUNS];
static size_t run_count;

int start_looking(void) {
    if (maps < 0)
        maps = open_file("/proc/self/maps");
    if (pagemap < 0)
        pagemap = open_file("/proc/self/pagemap");
    if (maps >= 0 && pagemap >= 0)
        return 1;
    done_looking();
    return 0;
}

void done_looking(void) {
    close_file(maps);
    close_file(pagemap);
    maps = pagemap = -1;
    looked_at = (struct range){0, 0};
}

static uint64_t number(const char **text, unsigned base) {
    uint64_t value = 0;
    for (;; ++*text) {
        char c = **text;
        unsigned digit = c >= '0' && c <= '9'   ? (unsigned)(c - '0')
                         : c >= 'a' && c <= 'f' ? c - 'a' + 10u
                                                : 99;
        if (digit >= base)
            return value;
        value = value * base + digit;
    }
}

uint64_t device_of(uint64_t major, uint64_t minor) {
    return (minor & 0xff) | major << 8 | (minor & ~0xffull) << 12;
}

static void parse(const char *text, struct mapping *found) {
    found->start = number(&text, 16), text++;
    found->end = number(&text, 16), text++;
    found->readable = text[0] == 'r';
    found->writable = text[1] == 'w';
    found->executable = text[2] == 'x';
    found->shared = text[3] == 's';
    text += 5;
    found->offset = number(&text, 16), text++;
    uint64_t major = number(&text, 16);
    text++;
    found->device = device_of(major, number(&text, 16));
    text++;
    found->inode = number(&text, 10);
}

/* The same from the text, on kernels without the query. */
static int find_in_text(uintptr_t address, struct mapping *found) {
    char text[4608];
    size_t held = 0;
    if (CALL3(SYS_lseek, maps, 0, 0) < 0)
        return 0;
    for (;;) {
        long got = CALL3(SYS_read, maps, text + held, sizeof text - held);
        size_t begin = 0;
        if (got <= 0)
            return 0;
        held += (size_t)got;
        for (size_t i = 0; i < held; i++) {
            if (text[i] != '\n')
                continue;
            text[i] = 0;
            parse(text + begin, found);
            if (found->end > address && found->inode)
                return 1;
            begin = i + 1;
        }
        if (!begin)
            return 0;
        copy(text, text + begin, held - begin);
        held -= begin;
    }
}

int find_mapping(uintptr_t address, struct mapping *found) {
    static int without_query;
    struct procmap_query query = {0};
    if (without_query || is_old_kernel())
        return find_in_text(address, found);
    query.size = sizeof query;
    query.flags = QUERY_COVERING_OR_NEXT | QUERY_FILE;
    query.address = address;
    long result = CALL3(SYS_ioctl, maps, PROCMAP_QUERY, &query);
    if (result == -2) /* ENOENT: there is none */
        return 0;
    if (result < 0) {
        without_query = 1;
        return find_in_text(address, found);
    }
    found->start = query.start;
    found->end = query.end;
    found->offset = query.offset;
    found->device = device_of(query.major, query.minor);
    found->inode = query.inode;
    found->readable = !!(query.vma_flags & QUERY_READABLE);
    found->writable = !!(query.vma_flags & QUERY_WRITABLE);
    found->executable = !!(query.vma_flags & QUERY_EXECUTABLE);
    found->shared = !!(query.vma_flags & QUERY_SHARED);
    return 1;
}

/* The same from the entries, on kernels without the scan. */
static struct range own_entries(uintptr_t start, uintptr_t end) {
    uint64_t entries[64];
    struct range found = {end, end};
    for (size_t pages; start < end; start += pages * PAGE) {
        pages = (end - start) / PAGE;
        if (pages > 64)
            pages = 64;
        long got = CALL6(SYS_pread64, pagemap, entries, pages * 8, start / PAGE * 8, 0, 0);
        if (got != (long)(pages * 8))
            return (struct range){start < found.start ? start : found.start, end};
        for (size_t i = 0; i < pages; i++) {
            /* In memory or swapped out, and of no file. */
            int own = entries[i] >> 62 && !(entries[i] >> 61 & 1);
            if (own && found.start == end)
                found.start = start + i * PAGE;
            if (!own && found.start != end)
                return (struct range){found.start, start + i * PAGE};
        }
    }
    return found;
}

void look_at(uintptr_t start, uintptr_t end) {
    static int without_scan;
    struct pagemap_scan scan = {0};
    looked_at = (struct range){start, start};
    run_count = 0;
    if (without_scan || is_old_kernel())
        return;
    scan.size = sizeof scan;
    scan.start = start;
    scan.end = end;
    scan.vector = (uintptr_t)runs;
    scan.vector_length = MOST_RUNS;
    scan.inverted = scan.all = IS_FILE;
    scan.any = IS_PRESENT | IS_SWAPPED;
    scan.returned = IS_PRESENT;
    long count = CALL3(SYS_ioctl, pagemap, PAGEMAP_SCAN, &scan);
    without_scan = count < 0;
    run_count = count < 0 ? 0 : (size_t)count;
    /* Where there is no room for more runs the last one may go on, and the rest was not looked at. */
    if (count == MOST_RUNS)
        looked_at.end = runs[--run_count].start;
    else if (count >= 0)
        looked_at.end = end;
}

struct range own_pages(uintptr_t start, uintptr_t end) {
    if (start >= end)
        return (struct range){end, end};
    if (start < looked_at.start || start >= looked_at.end)
        look_at(start, end);
    for (size_t i = 0; i < run_count; i++)
        if (runs[i].end > start && runs[i].start < end)
            return (struct range){runs[i].start > start ? runs[i].start : start,
                                  runs[i].end < end ? runs[i].end : end};
    if (end <= looked_at.end)
        return (struct range){end, end};
    if (start < looked_at.end)
        return own_pages(looked_at.end, end);
    return own_entries(start, end);
}
