/*
 * Files' segments by shared objects: one object for each file, with all that its segments show of it. Code and read-only data
 * stay shared for good. Writable data are shared page by page until they are written, as those of a file are: so nothing
 * needs the file's own pages any more, which are returned to the kernel.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#include "parts.h"

/* Most objects of the loader that are dealt with at a time, and most segments of one. */
#define MOST_OBJECTS 512
#define MOST_SEGMENTS 12
/* Bytes from which on one does not gather more before one asks: a store that has to read them needs its time. */
#define ENOUGH (16UL << 20)
/* Bytes behind the segments that are had with them: the table of sections is there, without which tools find no symbols. */
#define MORE (64UL << 10)
/* How often a busy store is asked, in pauses from 2 ms that double. */
#define ATTEMPTS 7

/* What is known of an object of the loader that was opened. */
struct opened {
    const struct link_map *map;
    uintptr_t base, inside;
    const char *name;
};

/* A file whose segments are to be exchanged. */
struct file {
    int fd;
    struct stat found;
    uint64_t mount;
    const char *name, *path;
    /* The part of the file that its segments show. */
    uint64_t start, end;
    int executable;
    struct mapping segments[MOST_SEGMENTS];
    size_t segment_count;
};

struct batch {
    struct file files[MOST_PIECES];
    size_t count;
    uint64_t bytes;
};

static struct opened opened[MOST_OBJECTS];
static size_t opened_count;

void note_opened(const struct link_map *map) {
    const char *name = map->l_name ? map->l_name : "", *c = name;
    while (*c && *c != '/')
        c++;
    /* The program has no name. What has one that is no path is the kernel's own library, without a file. */
    if (map->l_ld && opened_count < MOST_OBJECTS && (*c || !*name))
        opened[opened_count++] = (struct opened){map, map->l_addr, (uintptr_t)map->l_ld, name};
}

size_t opened_objects(void) { return opened_count; }

void forget_opened(const struct link_map *map) {
    for (size_t i = 0; i < opened_count; i++)
        if (opened[i].map == map)
            opened[i--] = opened[--opened_count];
}

/* ---- gathering ---- */

static const char GONE[] = "left alone: the file is no longer there under its name";

/* Finds the file that is mapped, not one that has taken its name since; its path, or NULL. The program has no name here. What it was
   started by may be a script, or lead elsewhere by now; what the kernel says it is takes an entry in /proc. */
static const char *find_mapped(const char *name, const struct mapping *at, struct stat *found,
                               uint64_t *mount) {
    const char *path = name[0] ? name : program_path();
    if (path && look_at_mounted(path, found, mount) == 0 && found->st_ino == at->inode &&
        (name[0] || found->st_dev == at->device))
        return path;
    if (!name[0] && look_at_mounted("/proc/self/exe", found, mount) == 0 && found->st_ino == at->inode)
        return "/proc/self/exe";
    say(GONE, name);
    return NULL;
}

/* Opens what was found there, to be shown; whether it is there still. */
static int open_found(struct file *file) {
    struct stat found;
    file->fd = open_file(file->path);
    if (file->fd >= 0 && CALL3(SYS_fstat, file->fd, &found, 0) == 0 && found.st_ino == file->found.st_ino &&
        found.st_dev == file->found.st_dev)
        return 1;
    close_file(file->fd);
    say(GONE, file->name);
    return 0;
}

/* Finds the segments of an object; whether there is anything to be had. */
static int gather(struct file *file, const struct opened *object) {
    struct mapping at, first = {0};
    int is_it = 0;
    file->name = object->name;
    file->segment_count = 0;
    file->executable = 0;
    file->start = ~0ul;
    file->end = 0;
    for (uintptr_t next = object->base; find_mapping(next, &at); next = at.end) {
        if (first.inode && at.inode != first.inode)
            break;
        if (!first.inode)
            first = at;
        if (!is_it && at.start > object->inside)
            break; /* The kernel's own library has no file: this is another. */
        is_it |= at.start <= object->inside && object->inside < at.end;
        if (at.shared || !at.readable || file->segment_count == MOST_SEGMENTS)
            continue;
        if (at.writable && at.executable) {
            say("a segment that is writable and executable is left alone", object->name);
            continue;
        }
        uint64_t end = at.offset + (at.end - at.start);
        file->start = at.offset < file->start ? at.offset : file->start;
        file->end = end > file->end ? end : file->end;
        file->executable |= at.executable;
        file->segments[file->segment_count++] = at;
    }
    /* The kernel's own has no file. */
    if (!is_it || !file->segment_count ||
        !(file->path = find_mapped(object->name, &first, &file->found, &file->mount)))
        return 0;
    uint64_t size = (uint64_t)file->found.st_size;
    if (file->end < size && size - file->end <= MORE)
        file->end = (size + PAGE - 1) & -PAGE;
    return 1;
}

/* ---- exchanging ---- */

/* Maps the object over a run of pages that are as in the file. The kernel takes the old pages away and puts the new ones there
   in one step: a thread that runs the code meanwhile notices nothing. */
static int exchange_run(const struct mapping *segment, uintptr_t start, uintptr_t end, int fd,
                        uint64_t offset) {
    int protection = PROT_READ | (segment->executable ? PROT_EXEC : 0) | (segment->writable ? PROT_WRITE : 0);
    /* Not MAP_POPULATE: it maps the pages one by one, where a fault maps sixteen. */
    long placed = CALL6(SYS_mmap, start, end - start, protection, MAP_PRIVATE | MAP_FIXED, fd, (long)offset);
    return placed == (long)start;
}

static void exchange_segment(const struct mapping *segment, const struct file *file, int fd,
                             uint64_t offset) {
    uintptr_t next = segment->start;
    int changed = 0;
    while (next < segment->end) {
        struct range own = own_pages(next, segment->end);
        uint64_t at = offset + segment->offset - file->start + (next - segment->start);
        if (own.start > next && !exchange_run(segment, next, own.start, fd, at))
            say("a segment is left alone: it could not be mapped", file->name);
        changed |= own.start < own.end;
        next = own.end;
    }
    if (changed && segment->executable)
        say("code is left alone that differs from the file (text relocations, or patched)", file->name);
}

/* All segments of a file, whose first bytes are at `offset` in the object. */
static void exchange_segments(const struct file *file, int fd, uint64_t offset) {
    look_at(file->segments[0].start, file->segments[file->segment_count - 1].end);
    for (size_t i = 0; i < file->segment_count; i++)
        exchange_segment(&file->segments[i], file, fd, offset);
}

static const char *refused(uint32_t refusal) {
    switch (refusal) {
    case DENIED:
        return "left alone: others may write it, or the policy allows no code";
    case QUOTA:
        return "left alone: the quota is used up";
    case CHANGED:
        return "left alone: it changes";
    case FILE_SYSTEM:
        return "left alone: its file system may never answer";
    default:
        return "left alone: the store refused";
    }
}

static void serve_file(struct file *file, const struct answer *answer, int fd) {
    uint64_t end = answer->offset + (file->end - file->start);
    if (end < answer->offset || !is_sealed(fd, end, NULL)) {
        say("left alone: its object is not sealed", file->name);
        return;
    }
    exchange_segments(file, fd, answer->offset);
    /* The store has the bytes now: the file's cached pages serve nobody but plain programs, which keep what they map. */
    if (answer->fresh)
        CALL6(SYS_fadvise64, file->fd, 0, 0, 4 /* POSIX_FADV_DONTNEED */, 0, 0);
}

/* Exchanges what is to be had without asking; whether it was. */
static int serve_named(struct file *file) {
    struct entry entry;
    int known = find_file(&file->found, file->mount, file->end, file->executable ? EXECUTABLE : 0, &entry);
    int fd = known ? open_object(&entry, file->end, NULL) : -1;
    if (fd < 0)
        return 0;
    exchange_segments(file, fd, file->start);
    close_file(fd);
    return 1;
}

/* Asks for what was gathered, and exchanges what there is; keeps what the store was too busy for. */
static void ask(struct batch *batch, int last) {
    struct piece pieces[MOST_PIECES];
    struct answer answers[MOST_PIECES];
    int fds[MOST_PIECES];
    struct exchange exchange = {.body = pieces, .files = fds, .told = answers, .room = sizeof answers};
    size_t next = 0, kept = 0;
    for (size_t i = 0; i < batch->count; i++) {
        const struct file *file = &batch->files[i];
        pieces[i] =
            (struct piece){file->executable ? EXECUTABLE : 0, 0, file->start, file->end - file->start};
        fds[i] = file->fd;
    }
    exchange.length = batch->count * sizeof *pieces;
    exchange.file_count = batch->count;
    int answered = ask_store(&exchange, ASK_FILES, TOLD_PIECES) &&
                   exchange.told_length == batch->count * sizeof *answers;
    for (size_t i = 0; i < batch->count; i++) {
        struct file *file = &batch->files[i];
        uint32_t refusal = answered ? answers[i].refusal : 0;
        if (refusal == BUSY && !last) {
            if (kept != i)
                copy(&batch->files[kept], file, sizeof *file);
            kept++;
            continue;
        }
        if (refusal)
            say(refused(refusal), file->name);
        else if (answered && next < exchange.descriptor_count)
            serve_file(file, &answers[i], exchange.descriptors[next++]);
        close_file(file->fd);
    }
    for (size_t i = 0; i < exchange.descriptor_count; i++)
        close_file(exchange.descriptors[i]);
    batch->count = kept;
}

static void flush(struct batch *batch) {
    struct timespec pause = {0, 2000000};
    for (int attempt = 1; batch->count; attempt++) {
        if (attempt > 1)
            CALL3(SYS_nanosleep, &pause, NULL, 0);
        pause.tv_nsec *= 2;
        ask(batch, attempt == ATTEMPTS);
    }
    batch->bytes = 0;
}

/* Room for files that have to be asked for. */
static struct batch *make_batch(void) {
    long place = CALL6(SYS_mmap, NULL, sizeof(struct batch), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return has_failed(place) ? NULL : (struct batch *)place;
}

void share_files(void) {
    struct batch *batch = NULL;
    struct file file;
    size_t count = opened_count;
    opened_count = 0;
    if (!count || !start_looking())
        return;
    for (size_t i = 0; i < count; i++) {
        if (!gather(&file, &opened[i]) || serve_named(&file))
            continue;
        if ((!batch && !(batch = make_batch())) || !open_found(&file))
            continue;
        copy(&batch->files[batch->count++], &file, sizeof file);
        batch->bytes += file.end - file.start;
        if (batch->count == MOST_PIECES || batch->bytes >= ENOUGH)
            flush(batch);
    }
    if (batch) {
        flush(batch);
        CALL3(SYS_munmap, batch, sizeof *batch, 0);
    }
}
