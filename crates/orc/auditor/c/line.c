/* The connection to the store. It is at a high descriptor, out of the program's way, and holds what was had through it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include "parts.h"

/* Where the connection's descriptor is put. */
#define HIGH_DESCRIPTOR 900
/* Seconds that the store may take to answer. */
#define PATIENCE 5
#define TOLD_REFUSED 0x105u
#define TOLD_RESTARTED 0x106u

struct header {
    char magic[4];
    uint32_t kind;
    uint64_t tag;
};

static int connection = -1;
/* The inode of its socket, and the file system that has it: another file may be at this descriptor by now. */
static uint64_t socket_inode, socket_device;
/* The process that made it. */
static long owner;
static uint64_t tag;

/* Whether the descriptor is still the connection: a program may close all that it does not know, or put a file of its own there. */
static int is_still_open(void) {
    struct stat found;
    return connection >= 0 && CALL3(SYS_fstat, connection, &found, 0) == 0 && found.st_ino == socket_inode &&
           found.st_dev == socket_device;
}

static int is_connected(void) {
    struct stat made;
    struct ucred peer = {0, ~0u, ~0u};
    socklen_t size = sizeof peer;
    struct timeval patience = {PATIENCE, 0};
    long self = CALL3(SYS_getpid, 0, 0, 0);
    if (owner == self && is_still_open())
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
    /* Connecting may take as long as sending: a store that hangs soon has more callers than it listens to. */
    CALL6(SYS_setsockopt, fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience, 0);
    CALL6(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience, 0);
    if (CALL3(SYS_connect, fd, store_address(), sizeof(struct sockaddr_un)) < 0) {
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
    if (CALL3(SYS_fstat, fd, &made, 0) < 0) {
        close_file((int)fd);
        give_up("left alone: the connection cannot be told from other descriptors");
        return 0;
    }
    connection = (int)fd;
    socket_inode = made.st_ino;
    socket_device = made.st_dev;
    owner = self;
    return 1;
}

static int send_question(const struct exchange *exchange, enum request request) {
    struct header header = {{'O', 'R', 'C', '1'}, request, tag};
    char control[CMSG_SPACE(MOST_PIECES * sizeof(int))] __attribute__((aligned(8)));
    struct iovec bytes[] = {{&header, sizeof header}, {(void *)exchange->body, exchange->length}};
    struct msghdr message = {0};
    message.msg_iov = bytes;
    message.msg_iovlen = 2;
    if (exchange->file_count) {
        message.msg_control = control;
        /* Without the padding behind the last one, which has no value. */
        message.msg_controllen = CMSG_LEN(exchange->file_count * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(exchange->file_count * sizeof(int));
        copy(CMSG_DATA(rights), exchange->files, exchange->file_count * sizeof(int));
    }
    return CALL3(SYS_sendmsg, connection, &message, MSG_NOSIGNAL) >= 0;
}

static void drop(struct exchange *exchange) {
    for (size_t i = 0; i < exchange->descriptor_count; i++)
        close_file(exchange->descriptors[i]);
    exchange->descriptor_count = 0;
}

/* Receives messages until one answers; 1, or 0 where there will be none. */
static int receive_answer(struct exchange *exchange, enum request request, enum reply reply) {
    for (;;) {
        char control[CMSG_SPACE(MOST_PIECES * sizeof(int))] __attribute__((aligned(8)));
        struct header header;
        struct iovec bytes[] = {{&header, sizeof header}, {exchange->told, exchange->room}};
        struct msghdr message = {0};
        message.msg_iov = bytes;
        message.msg_iovlen = 2;
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        long got = CALL3(SYS_recvmsg, connection, &message, MSG_CMSG_CLOEXEC);
        if (got == -EINTR)
            continue;
        if (got < (long)sizeof header)
            return 0;
        exchange->told_length = (size_t)got - sizeof header;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        if (rights && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
            exchange->descriptor_count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            copy(exchange->descriptors, CMSG_DATA(rights), exchange->descriptor_count * sizeof(int));
        }
        if (same(header.magic, "ORC1", 4) && header.kind == reply && header.tag == tag &&
            !(message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)))
            return 1;
        drop(exchange);
        if (header.kind == TOLD_RESTARTED) {
            if (!send_question(exchange, request))
                return 0;
        } else if (header.tag == tag) {
            /* The store says no, and is well. */
            exchange->told_length = 0;
            return header.kind == TOLD_REFUSED;
        }
    }
}

int ask_store(struct exchange *exchange, enum request request, enum reply reply) {
    exchange->descriptor_count = 0;
    exchange->told_length = 0;
    if (!is_connected())
        return 0;
    tag++;
    if (send_question(exchange, request) && receive_answer(exchange, request, reply))
        return exchange->told_length > 0;
    drop(exchange);
    give_up("left alone from here: the store does not answer");
    return 0;
}

/* An object with a name, or on disk, is a file that nobody may change any more: whether this one is. */
static int look_at_immutable(int fd, const char *path, struct statx *found) {
    return CALL6(SYS_statx, fd, path, AT_EMPTY_PATH, STATX_BASIC_STATS, found, 0) == 0 &&
           (found->stx_attributes & found->stx_attributes_mask & STATX_ATTR_IMMUTABLE);
}

int is_immutable(const char *path, uint64_t end, uint64_t *inode) {
    struct statx found;
    if (!look_at_immutable(AT_FDCWD, path, &found))
        return 0;
    *inode = found.stx_ino;
    return found.stx_size >= end;
}

int is_sealed(int fd, uint64_t end, uint64_t *inode) {
    struct stat found;
    struct statx more;
    long needed = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
    if (look_at_immutable(fd, "", &more)) {
        if (inode)
            *inode = more.stx_ino;
        return more.stx_size >= end;
    }
    /* Others are sealed memory. */
    long seals = CALL3(SYS_fcntl, fd, F_GET_SEALS, 0);
    if (seals < 0 || (seals & needed) != needed || CALL3(SYS_fstat, fd, &found, 0) < 0)
        return 0;
    if (inode)
        *inode = found.st_ino;
    return (uint64_t)found.st_size >= end;
}
