/* Makes calls that a policy may be about, by their numbers, and prints the error of each. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* A number that no kernel has given to a call yet. */
#define UNKNOWN 505

#define CALL(name, ...)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        long result = syscall(__VA_ARGS__);                                                                  \
        printf("%s %s\n", name, result < 0 ? strerrorname_np(errno) : "done");                               \
    } while (0)

static void paths(const char *path) {
    char bytes[600] = {0};
    long words[8] = {0};
    CALL("fchmodat2", 452, AT_FDCWD, path, 0600, 0);
    CALL("setxattrat", 463, AT_FDCWD, path, 0, "user.a", words, 16);
    CALL("getxattrat", 464, AT_FDCWD, path, 0, "user.a", words, 16);
    CALL("listxattrat", 465, AT_FDCWD, path, 0, bytes, 100);
    CALL("removexattrat", 466, AT_FDCWD, path, 0, "user.a");
    CALL("open_tree_attr", 467, AT_FDCWD, path, 0, words, 32);
    CALL("file_getattr", 468, AT_FDCWD, path, words, 24, 0);
    CALL("file_setattr", 469, AT_FDCWD, path, words, 24, 0);
    CALL("open_tree", SYS_open_tree, AT_FDCWD, path, 0);
    CALL("move_mount from", SYS_move_mount, AT_FDCWD, path, AT_FDCWD, "/", 0);
    CALL("move_mount to", SYS_move_mount, AT_FDCWD, "/", AT_FDCWD, path, 0);
    CALL("mount from", SYS_mount, path, "/nonexistent", "none", 0, 0);
    CALL("mount to", SYS_mount, "none", path, "none", 0, 0);
    CALL("umount2", SYS_umount2, path, 0);
    CALL("acct", SYS_acct, path);
    CALL("swapon", SYS_swapon, path, 0);
    CALL("quotactl", SYS_quotactl, 0x800007, path, 0, 0);
    CALL("name_to_handle_at", SYS_name_to_handle_at, AT_FDCWD, path, bytes, words, 0);
    CALL("fanotify_mark", SYS_fanotify_mark, -1, 0, 0, AT_FDCWD, path);
    CALL("mount_setattr", SYS_mount_setattr, AT_FDCWD, path, 0, words, 32);
    CALL("fspick", SYS_fspick, AT_FDCWD, path, 0);
    CALL("uselib", 134, path);
}

static void sockets(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    /* Without the zero at its end, which the kernel does not need. */
    socklen_t length = offsetof(struct sockaddr_un, sun_path) + strlen(address.sun_path);
    struct iovec part = {"x", 1};
    struct msghdr message = {.msg_name = &address, .msg_namelen = length, .msg_iov = &part, .msg_iovlen = 1};
    int stream = socket(AF_UNIX, SOCK_STREAM, 0), datagram = socket(AF_UNIX, SOCK_DGRAM, 0);
    CALL("connect", SYS_connect, stream, &address, length);
    CALL("sendto", SYS_sendto, datagram, "x", 1, 0, &address, length);
    CALL("sendmsg", SYS_sendmsg, datagram, &message, 0);
    /* The first one goes nowhere. */
    struct mmsghdr messages[3] = {0};
    messages[1].msg_hdr.msg_name = &(struct sockaddr_un){.sun_family = AF_UNIX, .sun_path = "/nonexistent"};
    messages[1].msg_hdr.msg_namelen = sizeof address;
    messages[2].msg_hdr = message;
    CALL("sendmmsg", SYS_sendmmsg, datagram, messages, 3, 0);
    CALL("bind", SYS_bind, stream, &address, length);
}

/* Has the kernel answer the unknown call with EDOM, as if it knew it. */
static int unknown(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, UNKNOWN, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EDOM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 1;
    CALL("unknown", UNKNOWN, 1, 2, 3);
    return 0;
}

/* Forbids itself the call by which an executive arms a new process, makes one, and has that print a file. */
static int filtered(const char *path) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_prctl, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        return 1;
    pid_t child = fork();
    if (child < 0)
        return 2;
    if (!child) {
        char bytes[100];
        int file = open(path, O_RDONLY);
        ssize_t length = read(file, bytes, sizeof bytes);
        _exit(length < 0 || write(1, bytes, length) != length);
    }
    int status;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
}

int main(int count, char **words) {
    if (count == 3 && !strcmp(words[1], "paths"))
        return paths(words[2]), 0;
    if (count == 3 && !strcmp(words[1], "sockets"))
        return sockets(words[2]), 0;
    if (count == 3 && !strcmp(words[1], "filtered"))
        return filtered(words[2]);
    if (count == 2 && !strcmp(words[1], "unknown"))
        return unknown();
    char parameters[120] = {0};
    CALL("io_uring_setup", SYS_io_uring_setup, 1, parameters);
    return 0;
}
