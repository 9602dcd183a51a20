/*
 * The part of ORC that lives in unmodified programs: an auditor of the dynamic loader (rtld-audit(7), LD_AUDIT).
 *
 * The loader tells it when the objects of a program are mapped, at the start and after each dlopen, before they are relocated.
 * It then asks the store for the objects that have the bytes of their read-only segments, showing the files, and maps these
 * objects in place of the files: at the same addresses, by one mremap(2) each, so that a thread that runs the code
 * meanwhile notices nothing. What it cannot have stays as it is. It defines neither la_symbind nor any pltenter, so that calls
 * between libraries cost what they always cost.
 *
 * It has no C library: the loader gives auditors a namespace of their own, and a second C library there would cost more
 * memory than many programs have to share.
 *
 * It leaves alone:
 *   - pages that differ from the file (text relocations, patches, breakpoints): told by /proc/self/pagemap;
 *   - what is writable;
 *   - programs that have filtered system calls (seccomp), unless ORRERY_ORC_SECCOMP=share says that sockets are allowed;
 *   - everything, where the store does not answer in time or belongs to somebody else.
 * ORRERY_ORC_VERBOSE=1 has it say so on standard error.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

#include "system.h"

#define EXPORT __attribute__((visibility("default")))
#define PAGE 4096UL
/* Most pieces in one message, as in protocol.rs. */
#define MOST_PIECES 64
/* Most objects of the loader that are dealt with at a time. */
#define MOST_OBJECTS 512
/* Where the connection's descriptor is put: out of the program's way. */
#define HIGH_DESCRIPTOR 900
/* Seconds that the store may take to answer. */
#define PATIENCE 5
/* How often a busy store is asked, in pauses from 2 ms that double. */
#define ATTEMPTS 7
#define EXECUTABLE 1u
#define BUSY 8u
#define KIND_FILES 4u
#define KIND_PIECES 0x103u
#define KIND_RESTARTED 0x106u
#define TEXT 4352

struct header {
    char magic[4];
    uint32_t kind;
    uint64_t tag;
};

struct piece {
    uint32_t flags, zero;
    uint64_t offset, length;
};

struct answer {
    uint32_t refusal, fresh;
    uint64_t offset, zero;
};

/* A mapping that is to be exchanged. */
struct wanted {
    uintptr_t start;
    size_t length;
    int protection;
    int file;
};

/* A line of /proc/self/maps. */
struct line {
    uintptr_t start, end;
    uint64_t offset, device, inode;
    char access[5];
    const char *name;
};

struct identity {
    uint64_t device, inode;
};

/* Scratch memory, mapped for as long as it is needed. */
struct scratch {
    struct identity objects[MOST_OBJECTS];
    size_t object_count;
    struct wanted wanted[MOST_PIECES];
    size_t wanted_count;
    int files[MOST_PIECES];
    char fresh[MOST_PIECES];
    struct {
        uintptr_t start, end;
    } data[MOST_PIECES];
    size_t file_count;
    struct identity last;
    struct {
        struct header header;
        struct piece pieces[MOST_PIECES];
    } request;
    struct {
        struct header header;
        struct answer answers[MOST_PIECES];
    } reply;
    char control[CMSG_SPACE(MOST_PIECES * sizeof(int))];
    uint64_t pages[512];
    char text[4 * TEXT];
    char name[TEXT];
};

/* Addresses of the dynamic sections of objects that were opened and not yet dealt with. */
static uintptr_t opened[MOST_OBJECTS];
static size_t opened_count;
/* The connection, the process that made it, and what is to be done. */
static int connection = -1;
static long owner;
static uint64_t tag;
static struct sockaddr_un store;
static int state; /* 0: nothing is known yet; 1: share; 2: leave everything alone */
static int verbose, under_seccomp;
static uint64_t filters;

static void say(const char *what, const char *name) {
    char text[400];
    size_t length = 0;
    const char *parts[] = {"orrery orc: ", name ? name : "", name ? ": " : "", what, "\n"};
    if (!verbose)
        return;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        for (const char *c = parts[i]; *c && length < sizeof text; c++)
            text[length++] = *c;
    CALL3(SYS_write, 2, text, length);
}

static int open_file(const char *path) {
    return (int)CALL6(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOCTTY, 0, 0, 0);
}

static void close_file(int fd) {
    if (fd >= 0)
        CALL3(SYS_close, fd, 0, 0);
}

/* ---- what the program was told, and what it may do ---- */

/* Finds the variables that are meant for us. */
static void read_environment(char *buffer, size_t size) {
    int fd = open_file("/proc/self/environ");
    size_t held = 0;
    if (fd < 0)
        return;
    for (;;) {
        long got = CALL3(SYS_read, fd, buffer + held, size - held);
        size_t begin = 0;
        if (got <= 0)
            break;
        held += (size_t)got;
        for (size_t i = 0; i < held; i++) {
            if (buffer[i])
                continue;
            const char *variable = buffer + begin;
            if (same(variable, "ORRERY_ORC=", 11) && i - begin - 11 < sizeof store.sun_path - 8) {
                size_t length = i - begin - 11;
                copy(store.sun_path, variable + 11, length);
                copy(store.sun_path + length, length ? "/socket" : "", length ? 8 : 1);
            } else if (same(variable, "ORRERY_ORC_VERBOSE=1", 21)) {
                verbose = 1;
            } else if (same(variable, "ORRERY_ORC_SECCOMP=share", 25)) {
                under_seccomp = 1;
            }
            begin = i + 1;
        }
        /* A variable that fills the buffer is none of ours. */
        if (begin == 0 && held == size)
            begin = held;
        copy(buffer, buffer + begin, held - begin);
        held -= begin;
    }
    close_file(fd);
}

/* The number of system-call filters and their mode, folded into one: 0 is none. */
static uint64_t count_filters(char *buffer, size_t size) {
    int fd = open_file("/proc/self/status");
    long got = fd < 0 ? -1 : CALL3(SYS_read, fd, buffer, size);
    uint64_t found = 0;
    close_file(fd);
    /* Without an answer the worst is assumed. */
    if (got <= 0)
        return 1;
    for (long i = 0; i + 18 < got; i++) {
        if (i && buffer[i - 1] != '\n')
            continue;
        long digits = 0;
        if (same(buffer + i, "Seccomp:", 8))
            digits = i + 8;
        else if (same(buffer + i, "Seccomp_filters:", 16))
            digits = i + 16;
        if (!digits)
            continue;
        uint64_t number = 0;
        for (; digits < got && buffer[digits] != '\n'; digits++)
            if (buffer[digits] >= '0' && buffer[digits] <= '9')
                number = number * 10 + (uint64_t)(buffer[digits] - '0');
        found = found * 1000 + number;
    }
    return found;
}

/* Whether there is anything to do in this process. */
static int may_share(struct scratch *scratch) {
    if (state == 2)
        return 0;
    uint64_t now = count_filters(scratch->text, sizeof scratch->text);
    if (state == 0) {
        state = 2;
        read_environment(scratch->text, sizeof scratch->text);
        if (!store.sun_path[0])
            return 0;
        if (now && !under_seccomp) {
            say("left alone: its system calls are filtered (ORRERY_ORC_SECCOMP=share, if sockets are "
                "allowed)",
                NULL);
            return 0;
        }
        store.sun_family = AF_UNIX;
        filters = now;
        state = 1;
    } else if (now != filters && !under_seccomp) {
        say("left alone from here: the program filters its system calls", NULL);
        state = 2;
        return 0;
    }
    return 1;
}

/* ---- the connection ---- */

static void give_up(const char *why) {
    say(why, NULL);
    state = 2;
    /* The connection stays open: it holds what was exchanged. */
}

static int connected(void) {
    struct ucred peer = {0, ~0u, ~0u};
    socklen_t size = sizeof peer;
    struct timeval patience = {PATIENCE, 0};
    long self = CALL3(SYS_getpid, 0, 0, 0);
    if (connection >= 0 && owner == self)
        return 1;
    /* In a forked child the parent's connection stays open, as it holds what both have mapped. */
    long fd = CALL3(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        give_up("left alone: no socket is to be had");
        return 0;
    }
    long high = CALL3(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH_DESCRIPTOR);
    if (high >= 0) {
        close_file((int)fd);
        fd = high;
    }
    if (CALL3(SYS_connect, fd, &store, sizeof store) < 0) {
        close_file((int)fd);
        give_up("left alone: there is no store");
        return 0;
    }
    CALL6(SYS_getsockopt, fd, SOL_SOCKET, SO_PEERCRED, &peer, &size, 0);
    if (peer.uid != 0 && peer.uid != (uid_t)CALL3(SYS_geteuid, 0, 0, 0)) {
        close_file((int)fd);
        give_up("left alone: the store belongs to another user");
        return 0;
    }
    CALL6(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience, 0);
    CALL6(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience, 0);
    connection = (int)fd;
    owner = self;
    return 1;
}

static int send_request(struct scratch *scratch) {
    size_t count = scratch->wanted_count;
    struct iovec bytes = {&scratch->request, sizeof scratch->request.header + count * sizeof(struct piece)};
    struct msghdr message = {0};
    message.msg_iov = &bytes;
    message.msg_iovlen = 1;
    message.msg_control = scratch->control;
    message.msg_controllen = CMSG_SPACE(count * sizeof(int));
    struct cmsghdr *control = CMSG_FIRSTHDR(&message);
    control->cmsg_level = SOL_SOCKET;
    control->cmsg_type = SCM_RIGHTS;
    control->cmsg_len = CMSG_LEN(count * sizeof(int));
    for (size_t i = 0; i < count; i++)
        copy(CMSG_DATA(control) + i * sizeof(int), &scratch->wanted[i].file, sizeof(int));
    return CALL3(SYS_sendmsg, connection, &message, MSG_NOSIGNAL) >= 0;
}

/* Receives the answer and its descriptors; how many these are, or -1. */
static int receive_reply(struct scratch *scratch, int *descriptors) {
    for (;;) {
        struct iovec bytes = {&scratch->reply, sizeof scratch->reply};
        struct msghdr message = {0};
        int count = 0;
        message.msg_iov = &bytes;
        message.msg_iovlen = 1;
        message.msg_control = scratch->control;
        message.msg_controllen = sizeof scratch->control;
        long got = CALL3(SYS_recvmsg, connection, &message, MSG_CMSG_CLOEXEC);
        if (got == -4) /* EINTR */
            continue;
        if (got < (long)sizeof(struct header))
            return -1;
        struct cmsghdr *control = CMSG_FIRSTHDR(&message);
        if (control && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
            count = (int)((control->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            copy(descriptors, CMSG_DATA(control), (size_t)count * sizeof(int));
        }
        struct header *header = &scratch->reply.header;
        if (same(header->magic, "ORC1", 4) && header->kind == KIND_PIECES && header->tag == tag &&
            got == (long)(sizeof *header + scratch->wanted_count * sizeof(struct answer)))
            return count;
        for (int i = 0; i < count; i++)
            close_file(descriptors[i]);
        if (header->kind == KIND_RESTARTED) {
            if (!send_request(scratch))
                return -1;
        } else if (header->tag == tag) {
            return -1;
        }
    }
}

/* ---- the exchange ---- */

/* Whether the memory file shows so many bytes for good. */
static int is_sealed(int fd, uint64_t end) {
    struct stat found;
    long seals = CALL3(SYS_fcntl, fd, F_GET_SEALS, 0);
    long needed = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
    return seals >= 0 && (seals & needed) == needed && CALL3(SYS_fstat, fd, &found, 0) == 0 &&
           (uint64_t)found.st_size >= end;
}

static int exchange_one(const struct wanted *wanted, const struct answer *answer, int fd) {
    if (!is_sealed(fd, answer->offset + wanted->length))
        return 0;
    long place =
        CALL6(SYS_mmap, NULL, wanted->length, wanted->protection, MAP_PRIVATE, fd, (long)answer->offset);
    if (place < 0 && place > -4096)
        return 0;
    long moved = CALL6(SYS_mremap, place, wanted->length, wanted->length, MREMAP_MAYMOVE | MREMAP_FIXED,
                       wanted->start, 0);
    if (moved != (long)wanted->start) {
        CALL3(SYS_munmap, place, wanted->length, 0);
        return 0;
    }
    return 1;
}

static const char *refused(uint32_t refusal) {
    switch (refusal) {
    case 2:
        return "a piece is left alone: others may write the file, or the policy allows no code";
    case 3:
        return "a piece is left alone: the quota is used up";
    case 9:
        return "a piece is left alone: the file changes";
    case 10:
        return "a piece is left alone: its file system may never answer";
    default:
        return "a piece is left alone: the store refused";
    }
}

static void was_read(struct scratch *scratch, int file) {
    for (size_t i = 0; i < scratch->file_count; i++)
        if (scratch->files[i] == file)
            scratch->fresh[i] = 1;
}

/* Asks for what was gathered, and exchanges what there is; keeps what the store was too busy for. */
static void ask(struct scratch *scratch, int last) {
    int descriptors[MOST_PIECES];
    int next = 0;
    size_t kept = 0;
    copy(scratch->request.header.magic, "ORC1", 4);
    scratch->request.header.kind = KIND_FILES;
    scratch->request.header.tag = ++tag;
    int given = send_request(scratch) ? receive_reply(scratch, descriptors) : -1;
    if (given < 0) {
        give_up("left alone from here: the store does not answer");
        scratch->wanted_count = 0;
        return;
    }
    for (size_t i = 0; i < scratch->wanted_count; i++) {
        const struct answer *answer = &scratch->reply.answers[i];
        const struct wanted *wanted = &scratch->wanted[i];
        const struct piece *piece = &scratch->request.pieces[i];
        if (answer->refusal == BUSY && !last) {
            copy(&scratch->wanted[kept], wanted, sizeof *wanted);
            copy(&scratch->request.pieces[kept++], piece, sizeof *piece);
        } else if (answer->refusal || next >= given) {
            say(refused(answer->refusal), NULL);
        } else {
            if (!exchange_one(wanted, answer, descriptors[next]))
                say("a piece is left alone: it could not be mapped", NULL);
            else if (answer->fresh)
                was_read(scratch, wanted->file);
            close_file(descriptors[next++]);
        }
    }
    for (; next < given; next++)
        close_file(descriptors[next]);
    scratch->wanted_count = kept;
}

/* Deals with all that was gathered. */
static void flush(struct scratch *scratch) {
    struct timespec pause = {0, 2000000};
    for (int attempt = 1; scratch->wanted_count && state == 1 && connected(); attempt++) {
        if (attempt > 1)
            CALL3(SYS_nanosleep, &pause, NULL, 0);
        pause.tv_nsec *= 2;
        ask(scratch, attempt == ATTEMPTS);
    }
    for (size_t i = 0; i < scratch->file_count; i++) {
        /* The store has the bytes now: the file's cached pages serve nobody but plain programs, which keep what they map.
           The whole file, as pages that are cached together go together. Its writable data is read before: a fault
           there later would have the kernel read the surroundings, all of the file perhaps, again. */
        if (scratch->fresh[i]) {
            if (scratch->data[i].end)
                CALL3(SYS_madvise, scratch->data[i].start, scratch->data[i].end - scratch->data[i].start,
                      22 /* MADV_POPULATE_READ */);
            CALL6(SYS_fadvise64, scratch->files[i], 0, 0, 4 /* POSIX_FADV_DONTNEED */, 0, 0);
        }
        scratch->data[i].end = 0;
        scratch->fresh[i] = 0;
        close_file(scratch->files[i]);
    }
    scratch->wanted_count = scratch->file_count = 0;
    scratch->last.inode = 0;
}

/* Whether pages in the range differ from the file: copies that were written. Without an answer they do. */
static int was_changed(struct scratch *scratch, int pagemap, uintptr_t start, uintptr_t end) {
    while (start < end) {
        size_t pages = (end - start) / PAGE;
        if (pages > 512)
            pages = 512;
        long got = CALL6(SYS_pread64, pagemap, scratch->pages, pages * 8, start / PAGE * 8, 0, 0);
        if (got != (long)(pages * 8))
            return 1;
        for (size_t i = 0; i < pages; i++) {
            uint64_t entry = scratch->pages[i];
            if (entry >> 62 && !(entry >> 61 & 1))
                return 1;
        }
        start += pages * PAGE;
    }
    return 0;
}

static void gather(struct scratch *scratch, const struct line *line, int pagemap) {
    struct stat found;
    if (was_changed(scratch, pagemap, line->start, line->end)) {
        say("read-only pages are left alone: they differ from the file (relocated, or patched)", line->name);
        return;
    }
    if (scratch->wanted_count == MOST_PIECES)
        flush(scratch);
    if (state != 1)
        return;
    if (scratch->last.inode != line->inode || scratch->last.device != line->device) {
        int fd = open_file(line->name);
        if (fd < 0 || CALL3(SYS_fstat, fd, &found, 0) != 0 || found.st_ino != line->inode) {
            close_file(fd);
            say("left alone: the file is no longer there under its name", line->name);
            return;
        }
        scratch->files[scratch->file_count++] = fd;
        scratch->last.inode = line->inode;
        scratch->last.device = line->device;
    }
    int executable = line->access[2] == 'x';
    struct wanted *wanted = &scratch->wanted[scratch->wanted_count];
    struct piece *piece = &scratch->request.pieces[scratch->wanted_count++];
    wanted->start = line->start;
    wanted->length = line->end - line->start;
    wanted->protection = PROT_READ | (executable ? PROT_EXEC : 0);
    wanted->file = scratch->files[scratch->file_count - 1];
    piece->flags = executable ? EXECUTABLE : 0;
    piece->zero = 0;
    piece->offset = line->offset;
    piece->length = wanted->length;
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

static void parse(const char *text, struct line *line) {
    line->start = number(&text, 16), text++;
    line->end = number(&text, 16), text++;
    copy(line->access, text, 4), line->access[4] = 0, text += 5;
    line->offset = number(&text, 16), text++;
    line->device = number(&text, 16) << 32, text++;
    line->device |= number(&text, 16), text++;
    line->inode = number(&text, 10);
    while (*text == ' ')
        text++;
    line->name = text;
}

static int is_known(const struct scratch *scratch, const struct line *line) {
    for (size_t i = 0; i < scratch->object_count; i++)
        if (scratch->objects[i].inode == line->inode && scratch->objects[i].device == line->device)
            return 1;
    return 0;
}

/* The first time the files of the objects that were opened are found; the second time their segments are gathered. */
static void look(struct scratch *scratch, const struct line *line, int pagemap) {
    if (!line->inode || line->name[0] != '/' || line->access[3] != 'p')
        return;
    if (pagemap < 0) {
        for (size_t i = 0; i < opened_count; i++)
            if (opened[i] >= line->start && opened[i] < line->end && !is_known(scratch, line) &&
                scratch->object_count < MOST_OBJECTS) {
                scratch->objects[scratch->object_count].device = line->device;
                scratch->objects[scratch->object_count++].inode = line->inode;
            }
    } else if (line->access[0] == 'r' && line->access[1] == '-' && is_known(scratch, line)) {
        gather(scratch, line, pagemap);
    } else if (line->access[1] == 'w' && scratch->file_count && scratch->last.inode == line->inode &&
               scratch->last.device == line->device) {
        scratch->data[scratch->file_count - 1].start = line->start;
        scratch->data[scratch->file_count - 1].end = line->end;
    }
}

static void for_each_line(struct scratch *scratch, int pagemap) {
    int fd = open_file("/proc/self/maps");
    size_t held = 0;
    if (fd < 0)
        return;
    for (;;) {
        long got = CALL3(SYS_read, fd, scratch->text + held, sizeof scratch->text - held);
        size_t begin = 0;
        if (got <= 0)
            break;
        held += (size_t)got;
        for (size_t i = 0; i < held; i++) {
            struct line line;
            if (scratch->text[i] != '\n')
                continue;
            scratch->text[i] = 0;
            parse(scratch->text + begin, &line);
            look(scratch, &line, pagemap);
            begin = i + 1;
        }
        copy(scratch->text, scratch->text + begin, held - begin);
        held -= begin;
        if (held == sizeof scratch->text)
            break;
    }
    close_file(fd);
}

static void exchange(void) {
    long place = CALL6(SYS_mmap, NULL, sizeof(struct scratch), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place < 0 && place > -4096)
        return;
    struct scratch *scratch = (struct scratch *)place;
    if (may_share(scratch)) {
        int pagemap = open_file("/proc/self/pagemap");
        if (pagemap >= 0) {
            for_each_line(scratch, -1);
            for_each_line(scratch, pagemap);
            flush(scratch);
            close_file(pagemap);
        }
    }
    opened_count = 0;
    CALL3(SYS_munmap, place, sizeof(struct scratch), 0);
}

/* ---- what the loader calls ---- */

EXPORT unsigned int la_version(unsigned int version) { return version < LAV_CURRENT ? version : LAV_CURRENT; }

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t space, uintptr_t *cookie) {
    (void)space;
    (void)cookie;
    if (map->l_ld && opened_count < MOST_OBJECTS)
        opened[opened_count++] = (uintptr_t)map->l_ld;
    /* No bindings are to be told of. */
    return 0;
}

EXPORT void la_activity(uintptr_t *cookie, unsigned int flag) {
    (void)cookie;
    if (flag == LA_ACT_CONSISTENT && opened_count)
        exchange();
}
