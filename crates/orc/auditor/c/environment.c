/* What the program was told by its environment, and what its filters of system calls let it do. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "parts.h"

enum state { UNKNOWN, SHARE, LEAVE_ALONE };

static enum state state;
/* Whether the loader is at work, and whether filters were looked for since it began. */
static int is_at_work, has_looked_for_filters;
static struct sockaddr_un store;
static int verbose, under_seccomp, old_kernel, without_places, other_auditors;

static char folder[sizeof store.sun_path];
static int has_read;
static const struct link_map *first_map;
static const char *started_by;

const struct sockaddr_un *store_address(void) { return &store; }
const char *store_folder(void) { return folder; }
const char *program_path(void) { return started_by; }

void say(const char *what, const char *name) {
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

int is_without_places(void) { return without_places; }
int is_old_kernel(void) { return old_kernel; }
int has_other_auditors(void) { return other_auditors; }
int is_left_alone(void) { return state == LEAVE_ALONE; }

void give_up(const char *why) {
    say(why, NULL);
    state = LEAVE_ALONE;
    /* The connection stays open: it holds what was exchanged. */
}

int open_file(const char *path) {
    return (int)CALL6(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOCTTY, 0, 0, 0);
}

long look_at_file(const char *path, struct stat *found) {
    return CALL6(SYS_newfstatat, AT_FDCWD, path, found, 0, 0, 0);
}

/* STATX_MNT_ID_UNIQUE, which older headers lack: a number that no other mount gets until the machine is started again. */
#define MOUNT_UNIQUE 0x4000u

long look_at_mounted(const char *path, struct stat *found, uint64_t *mount) {
    *mount = 0;
#ifdef STATX_MNT_ID
    struct statx more;
    long looked = is_old_kernel() ? -ENOSYS
                                  : CALL6(SYS_statx, AT_FDCWD, path, 0,
                                          STATX_BASIC_STATS | STATX_MNT_ID | MOUNT_UNIQUE, &more, 0);
    if (looked == 0) {
        found->st_dev = device_of(more.stx_dev_major, more.stx_dev_minor);
        found->st_ino = more.stx_ino;
        found->st_size = (off_t)more.stx_size;
        found->st_mtim = (struct timespec){more.stx_mtime.tv_sec, more.stx_mtime.tv_nsec};
        found->st_ctim = (struct timespec){more.stx_ctime.tv_sec, more.stx_ctime.tv_nsec};
        /* The kernel gives the unique number where it knows both. */
        *mount = more.stx_mask & (STATX_MNT_ID | MOUNT_UNIQUE) ? more.stx_mnt_id : 0;
        return 0;
    }
    /* A filter may know the older call only. */
    if (looked != -ENOSYS && looked != -EPERM)
        return looked;
#endif
    return look_at_file(path, found);
}

void close_file(int fd) {
    if (fd >= 0)
        CALL3(SYS_close, fd, 0, 0);
}

void close_own(int fd, uint64_t inode) {
    struct stat found;
    if (fd >= 0 && CALL3(SYS_fstat, fd, &found, 0) == 0 && found.st_ino == inode)
        close_file(fd);
}

static void read_variable(const char *variable, size_t length) {
    if (length > 9 && same(variable, "LD_AUDIT=", 9))
        for (size_t i = 9; i < length; i++)
            other_auditors |= variable[i] == ':';
    if (length <= 11 || !same(variable, "ORRERY_ORC", 10))
        return;
    if (same(variable, "ORRERY_ORC=", 11) && length - 11 < sizeof store.sun_path - 8) {
        copy(store.sun_path, variable + 11, length - 11);
        copy(folder, store.sun_path, length - 11);
        copy(store.sun_path + length - 11, length > 11 ? "/socket" : "", length > 11 ? 8 : 1);
    } else if (same(variable, "ORRERY_ORC_VERBOSE=1", 21)) {
        verbose = 1;
    } else if (same(variable, "ORRERY_ORC_SECCOMP=share", 25)) {
        under_seccomp = 1;
    } else if (same(variable, "ORRERY_ORC_KERNEL=old", 22)) {
        old_kernel = 1;
    } else if (same(variable, "ORRERY_ORC_PLACES=none", 23)) {
        without_places = 1;
    }
}

/* Finds the variables that are meant for us, where the loader does not tell of the stack. */
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
            read_variable(buffer + begin, i - begin);
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

void note_map(const struct link_map *map) {
    if (!first_map)
        first_map = map;
}

const char *const *program_environment(const char *const **arguments) {
    return find_environment(first_map, arguments);
}

int is_store_known(void) {
    if (!has_read) {
        const char *const *variables = program_environment(&(const char *const *){0});
        char buffer[4352];
        has_read = 1;
        started_by = find_program(variables);
        for (; variables && *variables; variables++)
            read_variable(*variables, length_of(*variables));
        if (!variables)
            read_environment(buffer, sizeof buffer);
    }
    return store.sun_path[0] != 0;
}

/* Whether system calls of the calling thread are filtered: filters are of threads. A filter may kill whoever makes a call that it does not
   expect, so this reads a file, as the loader does at this time. */
static int is_filtered(char *buffer, size_t size) {
    int fd = open_file("/proc/thread-self/status");
    long got = fd < 0 ? -1 : CALL3(SYS_read, fd, buffer, size);
    close_file(fd);
    /* It is near the end. */
    for (long i = got - 11; i >= 0; i--)
        if (buffer[i] == '\n' && same(buffer + i + 1, "Seccomp:\t", 9))
            return buffer[i + 10] != '0';
    /* Without an answer the worst is assumed. */
    return 1;
}

void begin_work(void) { is_at_work = 1; }

void begin_search(void) { has_looked_for_filters &= is_at_work; }

void end_work(void) { is_at_work = has_looked_for_filters = 0; }

int has_read_thread(void) { return state == SHARE && has_looked_for_filters && !under_seccomp; }

int may_share(void) {
    char buffer[4352];
    if (state == LEAVE_ALONE)
        return 0;
    if (state == SHARE && has_looked_for_filters)
        return 1;
    has_looked_for_filters = 1;
    if (state == UNKNOWN) {
        state = LEAVE_ALONE;
        if (!is_store_known())
            return 0;
        store.sun_family = AF_UNIX;
        if (!under_seccomp && is_filtered(buffer, sizeof buffer)) {
            say("left alone: its system calls are filtered (ORRERY_ORC_SECCOMP=share, if sockets are "
                "allowed)",
                NULL);
            return 0;
        }
        state = SHARE;
    } else if (!under_seccomp && is_filtered(buffer, sizeof buffer)) {
        give_up("left alone from here: the program filters its system calls");
        return 0;
    }
    return 1;
}
