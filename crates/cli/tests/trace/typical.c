/*
 * Makes system calls with typical arguments, for tools that show them. Those between the two calls of getppid are compared; each says
 * the same in every run, but for pointers and process IDs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/futex.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define NOTHING "/nonexistent/file"

static void files(void) {
    struct stat status;
    struct statfs system;
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 5};
    char bytes[64];
    int file = syscall(SYS_openat, AT_FDCWD, "/dev/null", O_RDWR | O_CLOEXEC | O_APPEND);
    syscall(SYS_open, NOTHING, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, 0640);
    syscall(SYS_openat, AT_FDCWD, NOTHING, O_RDONLY | O_DIRECTORY | O_PATH);
    fcntl(file, F_DUPFD, 100);
    fcntl(file, F_DUPFD_CLOEXEC, 101);
    fcntl(file, F_GETFD);
    fcntl(file, F_SETFD, FD_CLOEXEC);
    fcntl(file, F_GETFL);
    fcntl(file, F_SETFL, O_NONBLOCK | O_APPEND);
    fcntl(file, F_SETLK, &lock);
    lock.l_type = F_WRLCK;
    fcntl(file, F_SETLKW, &lock);
    fcntl(file, F_OFD_SETLK, &lock);
    syscall(SYS_fcntl, file, F_GETOWN);
    fcntl(file, F_GETPIPE_SZ);
    fcntl(file, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_GROW);
    fcntl(file, F_GETLEASE);
    fcntl(file, F_SETLEASE, F_UNLCK);
    flock(file, LOCK_EX | LOCK_NB);
    syscall(SYS_access, NOTHING, R_OK | X_OK);
    syscall(SYS_access, NOTHING, F_OK);
    syscall(SYS_faccessat2, AT_FDCWD, NOTHING, W_OK, AT_EACCESS | AT_SYMLINK_NOFOLLOW);
    syscall(SYS_newfstatat, AT_FDCWD, NOTHING, &status, AT_SYMLINK_NOFOLLOW);
    syscall(SYS_newfstatat, AT_FDCWD, "/dev/null", &status, 0);
    syscall(SYS_statx, AT_FDCWD, NOTHING, AT_STATX_DONT_SYNC | AT_SYMLINK_NOFOLLOW, STATX_SIZE | STATX_MTIME,
            bytes);
    statfs("/proc", &system);
    syscall(SYS_mkdir, NOTHING, 0755);
    syscall(SYS_mknod, NOTHING, S_IFIFO | 0600, 0);
    syscall(SYS_mknodat, AT_FDCWD, NOTHING, S_IFCHR | 0600, 0x103);
    umask(022);
    umask(022);
    syscall(SYS_chmod, NOTHING, 04755);
    syscall(SYS_chown, NOTHING, -1, 5);
    syscall(SYS_renameat2, AT_FDCWD, NOTHING, AT_FDCWD, NOTHING, RENAME_NOREPLACE);
    syscall(SYS_linkat, AT_FDCWD, NOTHING, AT_FDCWD, NOTHING, AT_SYMLINK_FOLLOW);
    syscall(SYS_unlinkat, AT_FDCWD, NOTHING, AT_REMOVEDIR);
    syscall(SYS_fallocate, file, FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, 0, 10);
    syscall(SYS_fadvise64, file, 0, 10, POSIX_FADV_SEQUENTIAL);
    syscall(SYS_sync_file_range, file, 0, 10, 2);
    lseek(file, 0, SEEK_END);
    lseek(file, 0, SEEK_DATA);
    syscall(SYS_readlink, "/proc/self/fd/-1", bytes, 10);
    chdir("/");
    syscall(SYS_getcwd, bytes, 64);
    syscall(SYS_getxattr, "/dev/null", "user.a", bytes, 5);
    syscall(SYS_setxattr, NOTHING, "user.a", "v", 1, 1);
    mount("none", NOTHING, "tmpfs", MS_NOSUID | MS_NODEV | MS_RELATIME, NULL);
    mount(NULL, NOTHING, NULL, MS_REC | MS_PRIVATE, NULL);
    umount2(NOTHING, MNT_DETACH | UMOUNT_NOFOLLOW);
    write(file, "abc", 3);
    read(file, bytes, 10);
    struct iovec parts[2] = {{"ab", 2}, {"cde", 3}};
    writev(file, parts, 2);
    syscall(SYS_pwritev2, file, parts, 2, 0, 0, 2);
    int watch = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    inotify_add_watch(watch, NOTHING, IN_CREATE | IN_DELETE | IN_ONESHOT);
    memfd_create("name", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    int pipes[2];
    pipe2(pipes, O_CLOEXEC | O_NONBLOCK);
    splice(pipes[0], NULL, file, NULL, 10, SPLICE_F_MOVE | SPLICE_F_NONBLOCK);
    tee(pipes[0], pipes[1], 1, SPLICE_F_NONBLOCK);
    dup3(file, 120, O_CLOEXEC);
    syscall(SYS_close_range, 200, 210, 4);
    close(200);
}

static void sockets(void) {
    int one = 1, pair[2];
    socklen_t length = sizeof one;
    struct linger linger = {1, 2};
    struct timeval timeout = {1, 500};
    int stream = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, IPPROTO_TCP);
    int datagram = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, IPPROTO_UDP);
    int route = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);
    socket(AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT);
    setsockopt(stream, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(stream, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    setsockopt(stream, SOL_SOCKET, SO_LINGER, &linger, sizeof linger);
    setsockopt(stream, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
    setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(stream, IPPROTO_TCP, TCP_KEEPIDLE, &one, sizeof one);
    setsockopt(stream, IPPROTO_IP, IP_TTL, &one, sizeof one);
    setsockopt(stream, IPPROTO_IP, IP_TOS, &one, sizeof one);
    setsockopt(datagram, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof one);
    setsockopt(datagram, IPPROTO_IPV6, IPV6_UNICAST_HOPS, &one, sizeof one);
    setsockopt(route, SOL_NETLINK, NETLINK_EXT_ACK, &one, sizeof one);
    getsockopt(stream, SOL_SOCKET, SO_ERROR, &one, &length);
    getsockopt(stream, SOL_SOCKET, SO_TYPE, &one, &length);
    listen(-1, 5);
    shutdown(stream, SHUT_RDWR);
    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
    accept4(stream, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec part = {"q", 1};
    struct msghdr message = {
        .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &stream, sizeof stream);
    sendmsg(pair[0], &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    sendto(pair[0], "abc", 3, MSG_DONTWAIT, NULL, 0);
    recvfrom(pair[1], control, 1, MSG_DONTWAIT | MSG_TRUNC, NULL, NULL);
    ioctl(stream, FIONREAD, &one);
    ioctl(stream, TCGETS, control);
    ioctl(-1, SIOCGIFCONF, NULL);
    ioctl(-1, TIOCGWINSZ, control);
}

static void memory(void) {
    char *pages =
        mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mmap(NULL, 4096, PROT_NONE, MAP_SHARED, -1, 0x3000);
    mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    mprotect(pages, 4096, PROT_NONE);
    madvise(pages, 8192, MADV_DONTNEED);
    madvise(pages, 8192, MADV_HUGEPAGE);
    msync(pages + 4096, 4096, MS_SYNC | MS_INVALIDATE);
    mremap(pages, 8192, 4096, MREMAP_MAYMOVE);
    mlock(pages, 100);
    syscall(SYS_mlock2, pages, 100, 1);
    mlockall(MCL_FUTURE | 8);
    munmap(pages, 4096);
    syscall(SYS_get_mempolicy, NULL, NULL, 0, NULL, 1024);
    syscall(SYS_pkey_mprotect, NULL, 0, PROT_READ, 3);
    syscall(SYS_shmget, IPC_PRIVATE, 0, IPC_CREAT | 0600);
    syscall(SYS_shmat, -1, NULL, SHM_RDONLY);
    syscall(SYS_shmctl, -1, IPC_STAT, NULL);
    syscall(SYS_semget, 0x1234, 0, IPC_EXCL | 0600);
    syscall(SYS_semctl, -1, 0, IPC_RMID, 0);
    syscall(SYS_msgctl, -1, IPC_RMID, NULL);
}

static void processes(void) {
    struct rlimit limit;
    struct rusage usage;
    int status = 0x7d;
    char name[16];
    sigset_t signals;
    siginfo_t info;
    getrlimit(RLIMIT_NOFILE, &limit);
    syscall(SYS_getrlimit, RLIMIT_CORE, &limit);
    limit = (struct rlimit){RLIM_INFINITY, RLIM_INFINITY};
    syscall(SYS_setrlimit, RLIMIT_CPU, &limit);
    limit = (struct rlimit){8 << 20, RLIM_INFINITY};
    syscall(SYS_prlimit64, 0, RLIMIT_STACK, &limit, NULL);
    getpriority(PRIO_PROCESS, 0);
    setpriority(PRIO_PGRP, 999999, 1);
    getrusage(RUSAGE_CHILDREN, &usage);
    prctl(PR_SET_NAME, "typical");
    prctl(PR_GET_NAME, name);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    prctl(PR_GET_DUMPABLE);
    prctl(PR_SET_DUMPABLE, 1);
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    prctl(PR_CAPBSET_READ, 21);
    prctl(PR_SET_TIMERSLACK, 50000);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGUSR1);
    syscall(SYS_rt_sigprocmask, SIG_BLOCK, &signals, NULL, 8);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, &signals, NULL, 8);
    kill(0, 0);
    kill(999999, SIGWINCH);
    syscall(SYS_tgkill, 999999, 999999, SIGRTMIN);
    wait4(-1, &status, WNOHANG | WUNTRACED, &usage);
    pid_t child = fork();
    if (!child)
        _exit(3);
    /* Until it has ended, but it stays: what the next call finds is sure then. */
    waitid(P_PID, child, &info, WEXITED | WNOWAIT);
    waitid(P_PID, child, &info, WEXITED | WNOHANG | WNOWAIT);
    wait4(child, &status, 0, NULL);
    waitid(P_PGID, 999999, NULL, WEXITED | WSTOPPED);
    syscall(SYS_unshare, CLONE_FS);
    syscall(SYS_setns, -1, CLONE_NEWNET);
    syscall(SYS_sched_setscheduler, 999999, SCHED_BATCH, NULL);
    syscall(SYS_sched_get_priority_max, SCHED_FIFO);
    sched_yield();
    syscall(SYS_arch_prctl, 0x1001, NULL);
    syscall(SYS_personality, 0xffffffff);
    syscall(SYS_kcmp, 999999, 999999, 2, 0, 0);
    syscall(SYS_seccomp, 2, 0, NULL);
    syscall(SYS_ptrace, 0x4200, 999999, 0, 0);
    syscall(SYS_setresuid, -1, -1, -1);
    syscall(SYS_membarrier, 0, 0);
    syscall(SYS_pidfd_open, 999999, 0);
    syscall(SYS_ioprio_get, 1, 999999);
    syscall(SYS_keyctl, 0, 5, 0);
    syscall(SYS_execveat, -1, "", NULL, NULL, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
}

static void waits(void) {
    struct timespec moment = {0, 1000};
    struct itimerval interval = {{0, 0}, {0, 0}};
    struct epoll_event event = {.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT};
    int word = 1, pipes[2];
    pipe(pipes);
    write(pipes[1], "x", 1);
    struct pollfd descriptor = {pipes[0], POLLIN | POLLPRI, 0};
    poll(&descriptor, 1, 0);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[0], &event);
    epoll_ctl(epoll, EPOLL_CTL_DEL, pipes[0], NULL);
    epoll_wait(epoll, &event, 1, 0);
    eventfd(3, EFD_CLOEXEC | EFD_SEMAPHORE);
    timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
    syscall(SYS_timerfd_settime, -1, TFD_TIMER_ABSTIME, NULL, NULL);
    syscall(SYS_signalfd4, -1, NULL, 8, 0x80000);
    syscall(SYS_nanosleep, &moment, &moment);
    syscall(SYS_clock_nanosleep, CLOCK_REALTIME, 0, &moment, NULL);
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, NULL);
    syscall(SYS_clock_getres, CLOCK_BOOTTIME, &moment);
    setitimer(ITIMER_VIRTUAL, &interval, NULL);
    getitimer(ITIMER_PROF, &interval);
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1);
    syscall(SYS_futex, &word, FUTEX_WAIT, 2, NULL);
    syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE | FUTEX_CLOCK_REALTIME, 2, NULL, NULL, -1);
    syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, 1, NULL, NULL, -1);
    syscall(SYS_getrandom, &word, 0, 3);
    syscall(SYS_userfaultfd, O_CLOEXEC | O_APPEND);
    syscall(SYS_fanotify_init, 3, O_RDONLY);
    syscall(SYS_io_uring_register, -1, 2, NULL, 0);
    syscall(SYS_bpf, 5, NULL, 0);
}

/* Makes the calls that lines of a file tell: a number, and six arguments, of which `path` is a pointer. */
static int listed(const char *name) {
    static char list[65536];
    /* All of it is read before the first of its calls. */
    int file = open(name, O_RDONLY);
    if (file < 0 || read(file, list, sizeof list - 1) <= 0)
        return 1;
    close(file);
    syscall(SYS_getppid);
    for (char *word = strtok(list, " \n"); word;) {
        long values[7];
        for (int at = 0; at < 7; at++, word = strtok(NULL, " \n"))
            values[at] = strcmp(word, "path") ? strtol(word, NULL, 0) : (long)NOTHING;
        syscall(values[0], values[1], values[2], values[3], values[4], values[5], values[6]);
    }
    syscall(SYS_getppid);
    return 0;
}

int main(int count, char **words) {
    if (count == 2)
        return listed(words[1]);
    syscall(SYS_getppid);
    files();
    sockets();
    memory();
    waits();
    processes();
    syscall(SYS_getppid);
    return 0;
}
