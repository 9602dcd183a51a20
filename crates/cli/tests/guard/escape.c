/*
 * More than a hundred ways out of a guard, each tried once: names, processes, addresses, the kernel's own controls.
 *
 * escape all FOLDER SECRET PID SOCKET NAME PORT: the process, the Unix sockets and the port are outside. Tells of each way
 * that led out, then how many there were; what a guarded program may well do is tried, too. Nothing here changes more than
 * the process outside even where no guard holds it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/netlink.h>
#include <linux/openat2.h>
#include <linux/perf_event.h>
#include <linux/rtnetlink.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>

#include "attacker.h"

static int tries, ways;
static pid_t outside;
static const char *socket_path, *socket_name;
static int port;

/* What must not succeed. */
static void out(long result, const char *how) {
    tries++;
    if (result >= 0) {
        ways++;
        printf("OUT: %s\n", how);
    }
}

/* What must not get as far as to the kernel, which says `reached` where it did. */
static void out_at(long result, int reached, const char *how) {
    out(result < 0 && errno != reached ? -1 : 0, how);
}

/* What a guarded program may do. */
static void may(long result, const char *what) {
    if (result < 0 && errno != ENOSYS) {
        ways++;
        printf("DENIED: %s: %s\n", what, strerror(errno));
    }
}

/* Whether the secret can be read there; a descriptor goes in. */
static long reads(int fd) {
    char text[64];
    ssize_t count = fd < 0 ? -1 : read(fd, text, sizeof(text));

    if (fd >= 0)
        close(fd);
    return count > 0 ? count : -1;
}

static const char *text(const char *format, const char *path) {
    static char texts[8][8192];
    static int next;
    char *result = texts[next++ % 8];

    snprintf(result, sizeof(texts[0]), format, path);
    return result;
}

static const char *of_outside(const char *name) {
    static char path[128];

    snprintf(path, sizeof(path), "/proc/%d/%s", outside, name);
    return path;
}

static void names(void) {
    struct open_how how = {.flags = O_RDONLY};
    char buffer[4096], *folder = strdup(secret);
    struct stat status;
    int fd, root = open("/", O_PATH | O_DIRECTORY), watch;

    *strrchr(folder, '/') = 0;
    out(reads(open(secret, O_RDONLY)), "its name");
    out(reads(open(secret, O_RDWR)), "its name, for writing");
    out(reads(openat(root, secret + 1, O_RDONLY)), "its name from the root");
    out(reads(open(text("/proc/self/root%s", secret), O_RDONLY)), "/proc/self/root");
    out(reads(open(text("/proc/thread-self/root%s", secret), O_RDONLY)), "/proc/thread-self/root");
    out(reads(open(text("/proc/self/cwd/../../../../../../../..%s", secret), O_RDONLY)), "/proc/self/cwd");
    out(reads(open(text("/dev/fd/../root%s", secret), O_RDONLY)), "/dev/fd/../root");
    out(reads(open(text(of_outside("root%s"), secret), O_RDONLY)), "another process' root");
    out(reads(open(text("//proc/./self/task/../root%s", secret), O_RDONLY)), "dots in /proc");
    if (symlink(secret, text("%s/soft", work)) == 0)
        examine(open(text("%s/soft", work), O_RDONLY), "a symbolic link");
    out(reads(open(text("%s/soft", work), O_RDONLY | O_CREAT, 0644)), "making it through a symbolic link");
    out(link(secret, text("%s/hard", work)), "a hard link");
    fd = open(secret, O_PATH);
    out(fd, "standing for it");
    out(fd < 0 ? -1 : linkat(fd, "", AT_FDCWD, text("%s/hard2", work), AT_EMPTY_PATH), "a link of that");
    out(rename(secret, text("%s/moved", work)), "moving it away");
    out(syscall(SYS_renameat2, AT_FDCWD, secret, AT_FDCWD, text("%s/soft", work), 2), "exchanging it");
    out(rename(folder, text("%s/moved", work)), "moving its directory away");
    out(reads((int)syscall(SYS_openat2, AT_FDCWD, secret, &how, sizeof(how))), "openat2");
    how.resolve = RESOLVE_IN_ROOT;
    out(reads((int)syscall(SYS_openat2, root, secret, &how, sizeof(how))), "openat2 in a root");
    how.resolve = RESOLVE_BENEATH;
    out(reads((int)syscall(SYS_openat2, root, secret + 1, &how, sizeof(how))), "openat2 beneath");
    out(syscall(SYS_name_to_handle_at, AT_FDCWD, secret, buffer, buffer + 512, 0), "a handle");
    out_at(syscall(SYS_open_by_handle_at, root, buffer, O_RDONLY), ESTALE, "opening by handle");
    out(truncate(secret, 3), "truncate");
    out(chmod(secret, 0666), "chmod");
    out(syscall(452 /* fchmodat2 */, AT_FDCWD, secret, 0666, 0), "fchmodat2");
    out(syscall(SYS_chown, secret, 1, 1), "chown");
    out(utimensat(AT_FDCWD, secret, NULL, 0), "its times");
    out(setxattr(secret, "user.x", "y", 1, 0), "an attribute");
    out_at(getxattr(secret, "user.x", buffer, 8), ENODATA, "its attributes");
    out(listxattr(secret, buffer, sizeof(buffer)), "a list of its attributes");
    out(stat(secret, &status), "stat");
    out(access(secret, F_OK), "access");
    out_at(readlink(secret, buffer, sizeof(buffer)), EINVAL, "readlink");
    out(unlink(secret), "removing it");
    out(rmdir(folder), "removing its directory");
    out(open(folder, O_RDONLY | O_DIRECTORY), "listing its directory");
    out(open(text("%s/new", folder), O_WRONLY | O_CREAT, 0644), "making a file beside it");
    out(mkdir(text("%s/newdir", folder), 0755), "making a directory beside it");
    watch = inotify_init1(0);
    out(inotify_add_watch(watch, secret, IN_ALL_EVENTS), "watching it");
    if (chdir(folder) == 0) {
        out(reads(open(strrchr(secret, '/') + 1, O_RDONLY)), "its name from its directory");
        out(open("new", O_WRONLY | O_CREAT, 0644), "making a file from its directory");
    }
    may(chdir(work), "going back");
    free(folder);
}

static void spaces(void) {
    static const struct {
        const char *name;
        int flag;
    } kinds[] = {{"users", CLONE_NEWUSER},    {"mounts", CLONE_NEWNS}, {"network", CLONE_NEWNET},
                 {"processes", CLONE_NEWPID}, {"ipc", CLONE_NEWIPC},   {"names", CLONE_NEWUTS},
                 {"groups", CLONE_NEWCGROUP}};
    uint64_t arguments[11] = {CLONE_NEWUSER, 0, 0, 0, SIGCHLD};
    char bytes[256] = {0};
    pid_t child;

    for (size_t i = 0; i < sizeof(kinds) / sizeof(*kinds); i++) {
        out(unshare(kinds[i].flag), text("a namespace of %s", kinds[i].name));
        child = (pid_t)syscall(SYS_clone, kinds[i].flag | SIGCHLD, 0, 0, 0, 0);
        if (child == 0)
            _exit(0);
        out(child, text("a child in a namespace of %s", kinds[i].name));
        if (child > 0)
            waitpid(child, NULL, 0);
    }
    child = (pid_t)syscall(SYS_clone3, arguments, sizeof(arguments));
    if (child == 0)
        _exit(0);
    out(child, "clone3");
    out(mount("/", work, "", MS_BIND, ""), "binding the root");
    out(mount("x", work, "tmpfs", 0, ""), "mounting memory");
    out(umount2("/proc", MNT_DETACH), "umount");
    out(chroot(work), "chroot");
    out(syscall(SYS_pivot_root, work, work), "pivot_root");
    out_at(syscall(SYS_setns, -1, 0), EBADF, "setns");
    out(syscall(SYS_open_tree, AT_FDCWD, secret, 1), "open_tree");
    out(syscall(SYS_fsopen, "tmpfs", 0), "fsopen");
    out_at(syscall(SYS_move_mount, -1, "", -1, "", 4), EBADF, "move_mount");
    out(mknod(text("%s/disk", work), S_IFBLK | 0600, 0x0801), "a disk of its own");
    out(mknod(text("%s/memory", work), S_IFCHR | 0600, 0x0101), "memory as a file");
    out(syscall(SYS_io_uring_setup, 4, bytes), "io_uring");
    out(syscall(SYS_open | 0x40000000, secret, O_RDONLY), "an x32 call");
#ifdef __x86_64__
    {
        long result;

        __asm__ volatile("int $0x80" : "=a"(result) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
        out(result > 0 ? 0 : -1, "a 32-bit call");
    }
#endif
}

static void processes(void) {
    struct rlimit few = {64, 64}, none = {0, 0}, old;
    struct sched_param plain = {0};
    uint32_t attributes[12] = {sizeof(attributes), SCHED_BATCH};
    char bytes[64];
    struct iovec mine = {bytes, sizeof(bytes)}, theirs = {(void *)0x400000, sizeof(bytes)};
    siginfo_t information = {.si_signo = SIGCONT, .si_code = SI_QUEUE};
    unsigned long nodes = 1;
    void *page = bytes;
    int status = 0, monitor = getppid(), handle, pair[2];
    /* Who has no processes, lest a guard that fails changes others'. */
    const id_t nobody = 424242;
    cpu_set_t all;
    pid_t child;

    out(ptrace(PTRACE_ATTACH, outside, 0, 0), "attaching");
    out(ptrace(PTRACE_SEIZE, outside, 0, 0), "seizing");
    out(ptrace(PTRACE_SEIZE, monitor, 0, 0), "seizing the monitor");
    out(process_vm_readv(outside, &mine, 1, &theirs, 1, 0), "reading memory");
    out(process_vm_writev(outside, &mine, 1, &theirs, 1, 0), "writing memory");
    out(open(of_outside("mem"), O_RDONLY), "/proc/PID/mem");
    out(open(of_outside("environ"), O_RDONLY), "/proc/PID/environ");
    out(open(of_outside("maps"), O_RDONLY), "/proc/PID/maps");
    out(open(of_outside("fd/0"), O_RDONLY), "/proc/PID/fd");
    out(open(of_outside("oom_score_adj"), O_WRONLY), "/proc/PID/oom_score_adj");
    out(open(of_outside("comm"), O_WRONLY), "/proc/PID/comm");
    handle = (int)syscall(SYS_pidfd_open, outside, 0);
    if (handle >= 0) {
        out(syscall(SYS_pidfd_getfd, handle, 0, 0), "its descriptors");
        out(syscall(SYS_process_madvise, handle, &theirs, 1UL, MADV_COLD, 0), "advice about its memory");
    }
    out(syscall(SYS_kcmp, outside, outside, 0, 0, 0), "comparing");
    out(kill(outside, SIGCONT), "a signal");
    out(syscall(SYS_tgkill, outside, outside, SIGCONT), "a signal to a thread");
    out(syscall(SYS_rt_sigqueueinfo, outside, SIGCONT, &information), "a queued signal");
    out(kill(monitor, SIGCONT), "a signal to the monitor");
    out(kill(-getpgid(outside), SIGCONT), "a signal to another's group");
    handle = open(of_outside("."), O_RDONLY | O_DIRECTORY);
    out(handle < 0 ? -1 : syscall(SYS_pidfd_send_signal, handle, SIGCONT, NULL, 0), "a signal by /proc");
    /* Landlock lets everybody be chosen and signals nobody outside; SIGIO would end the other. */
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0) {
        fcntl(pair[0], F_SETOWN, outside);
        fcntl(pair[0], F_SETFL, O_ASYNC);
        may(write(pair[1], "x", 1), "writing to its own socket");
        may(fcntl(pair[0], F_SETOWN, getpid()), "signals for itself");
        close(pair[0]);
    }
    out(prlimit(outside, RLIMIT_NOFILE, &few, NULL), "limits of another");
    out(prlimit(outside, RLIMIT_CPU, &none, NULL), "a deadly limit of another");
    out(prlimit(monitor, RLIMIT_NOFILE, &few, NULL), "limits of the monitor");
    out(prlimit(monitor, RLIMIT_CPU, &none, NULL), "a deadly limit of the monitor");
    out(setpriority(PRIO_PROCESS, (id_t)outside, 5), "another's priority");
    out(setpriority(PRIO_PROCESS, (id_t)monitor, 5), "the monitor's priority");
    out(setpriority(PRIO_PGRP, (id_t)getpgid(outside), 5), "the priority of another's group");
    out(setpriority(PRIO_PGRP, 0, 5), "the priority of the monitor's group");
    out_at(setpriority(PRIO_USER, nobody, 5), ESRCH, "a user's priority");
    out(sched_setscheduler(outside, SCHED_BATCH, &plain), "another's scheduler");
    out(sched_setparam(outside, &plain), "another's parameters");
    out(syscall(SYS_sched_setattr, outside, attributes, 0), "another's attributes");
    CPU_ZERO(&all);
    CPU_SET(0, &all);
    out(sched_setaffinity(outside, sizeof(all), &all), "another's processors");
    out(sched_setaffinity(monitor, sizeof(all), &all), "the monitor's processors");
    out(syscall(SYS_ioprio_set, 1, outside, 3 << 13), "another's i/o");
    out(syscall(SYS_ioprio_set, 2, getpgid(outside), 3 << 13), "i/o of another's group");
    out_at(syscall(SYS_ioprio_set, 3, nobody, 3 << 13), ESRCH, "a user's i/o");
    out(syscall(SYS_migrate_pages, outside, 8, &nodes, &nodes), "another's pages");
    out(syscall(SYS_move_pages, outside, 1, &page, NULL, &status, 0), "where another's pages are");
    out(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0), "new privileges");
    out(prctl(PR_SET_MM, PR_SET_MM_START_BRK, 0, 0, 0), "another end of the heap");
    /* All that may be done to oneself and one's own. */
    may(prlimit(outside, RLIMIT_NOFILE, NULL, &old), "looking at limits");
    may(prlimit(0, RLIMIT_NOFILE, NULL, &old), "looking at its own limits");
    may(prlimit(getpid(), RLIMIT_NOFILE, &old, NULL), "setting its own limits");
    may(setrlimit(RLIMIT_CORE, &none), "no core at all");
    may(setpriority(PRIO_PROCESS, 0, 5), "its own priority");
    may(setpriority(PRIO_PROCESS, (id_t)getpid(), 5), "its own priority by number");
    may(sched_setscheduler(0, SCHED_BATCH, &plain), "its own scheduler");
    may(sched_setaffinity(getpid(), sizeof(all), &all), "its own processors");
    may(syscall(SYS_ioprio_set, 1, 0, 3 << 13), "its own i/o");
    child = fork();
    if (child == 0) {
        setpgid(0, 0);
        pause();
        _exit(0);
    }
    setpgid(child, child);
    may(prlimit(child, RLIMIT_NOFILE, &few, NULL), "limits of its child");
    may(setpriority(PRIO_PGRP, (id_t)child, 6), "priority of its child's group");
    may(sched_setaffinity(child, sizeof(all), &all), "processors of its child");
    may(syscall(SYS_migrate_pages, child, 8, &nodes, &nodes), "pages of its child");
    handle = (int)syscall(SYS_pidfd_open, child, 0);
    may(syscall(SYS_pidfd_send_signal, handle, SIGCONT, NULL, 0), "a signal to its child by descriptor");
    may(kill(child, SIGKILL), "a signal to its child");
    waitpid(child, NULL, 0);
}

static void addresses(void) {
    struct sockaddr_un path = {.sun_family = AF_UNIX}, name = {.sun_family = AF_UNIX};
    struct sockaddr_in to = {AF_INET, htons((uint16_t)port), {htonl(INADDR_LOOPBACK)}, {0}};
    struct sockaddr_in any = {AF_UNSPEC, htons(0), {0}, {0}};
    socklen_t named = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(socket_name));
    int s = socket(AF_UNIX, SOCK_STREAM, 0), one = 1;
    char route[8] = {0x83, 7, 4, 127, 0, 0, 1, 0};

    snprintf(path.sun_path, sizeof(path.sun_path), "%s", socket_path);
    snprintf(name.sun_path + 1, sizeof(name.sun_path) - 1, "%s", socket_name);
    out(connect(s, (void *)&path, sizeof(path)), "a Unix socket");
    out(connect(s, (void *)&name, named), "an abstract socket");
    out(bind(s, (void *)&path, sizeof(sa_family_t)), "a name of the kernel's choice");
    snprintf(path.sun_path, sizeof(path.sun_path), "%s", text("%s/listening", work));
    out(bind(s, (void *)&path, sizeof(path)), "a Unix socket of its own");
    out(sendto(s, "x", 1, MSG_FASTOPEN, (void *)&path, sizeof(path)), "a message by path");
    s = socket(AF_INET, SOCK_STREAM, 0);
    out(connect(s, (void *)&to, sizeof(to)), "connecting");
    out(sendto(s, "x", 1, MSG_FASTOPEN, (void *)&to, sizeof(to)), "connecting with a message");
    out(bind(s, (void *)&any, sizeof(any)), "binding no address");
    out(setsockopt(s, IPPROTO_IP, 4, route, sizeof(route)), "a source route");
    out(setsockopt(s, SOL_SOCKET, SO_MARK, &one, sizeof(one)), "a mark");
    out(listen(s, 1), "listening");
    out(listen(socket(AF_INET6, SOCK_STREAM, 0), 1), "listening to IPv6");
    s = socket(AF_INET, SOCK_STREAM, 262);
    out(s < 0 ? -1 : connect(s, (void *)&to, sizeof(to)), "MPTCP");
    out(s < 0 ? -1 : listen(s, 1), "listening to MPTCP");
    out(socket(AF_INET, SOCK_DGRAM, 0), "datagrams");
    out(socket(AF_INET, SOCK_SEQPACKET, 0), "SCTP by its kind");
    out(socket(AF_INET, SOCK_STREAM, 132), "SCTP");
    out(socket(AF_INET, SOCK_RAW, 1), "raw packets");
    out(socket(AF_PACKET, SOCK_RAW, 0), "frames");
    out(socket(AF_NETLINK, SOCK_RAW, NETLINK_AUDIT), "the audit");
    out(socket(AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER), "the packet filter");
    out(socket(AF_NETLINK, SOCK_RAW, NETLINK_GENERIC), "generic netlink");
    out(socket(38 /* AF_ALG */, SOCK_SEQPACKET, 0), "the kernel's ciphers");
    out(socket(40 /* AF_VSOCK */, SOCK_STREAM, 0), "the host of a virtual machine");
    out(socket(44 /* AF_XDP */, SOCK_RAW, 0), "a network card's queue");
}

/* Asks the kernel to set a flag of the loopback interface that it has anyway; the answer says whether it did. */
static long changes_interface(void) {
    struct {
        struct nlmsghdr header;
        struct ifinfomsg interface;
    } request = {{sizeof(request), RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK, 1, 0},
                 {.ifi_index = 1, .ifi_flags = 1, .ifi_change = 1}};
    struct {
        struct nlmsghdr header;
        struct nlmsgerr error;
        char rest[256];
    } answer;
    int s = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);

    if (s < 0 || send(s, &request, sizeof(request), 0) < 0 || recv(s, &answer, sizeof(answer), 0) < 0)
        return -1;
    return answer.error.error;
}

/* Writes back what a setting says, or nothing at all to a device. */
static long writes(const char *path) {
    char now[4096];
    int fd = open(path, O_RDWR | O_NONBLOCK);
    long count;

    if (fd < 0)
        fd = open(path, O_WRONLY | O_NONBLOCK);
    if (fd < 0)
        return -1;
    count = read(fd, now, sizeof(now));
    lseek(fd, 0, SEEK_SET);
    if (count > 0 && strncmp(path, "/proc/sys/", 10) == 0)
        count = write(fd, now, (size_t)count);
    close(fd);
    return 0;
}

static void controls(void) {
    static const char *const settings[] = {"/proc/sys/kernel/core_pattern",
                                           "/proc/sys/kernel/modprobe",
                                           "/proc/sys/kernel/hotplug",
                                           "/proc/sys/vm/overcommit_memory",
                                           "/proc/sys/net/ipv4/ip_forward",
                                           "/proc/sysrq-trigger",
                                           "/sys/kernel/uevent_helper",
                                           "/proc/sys/fs/binfmt_misc/register",
                                           "/sys/power/state",
                                           "/dev/kmsg",
                                           "/dev/mem",
                                           "/dev/port",
                                           "/dev/kvm",
                                           "/dev/vda",
                                           "/dev/sda",
                                           "/dev/loop-control",
                                           "/dev/fuse",
                                           "/dev/net/tun"};
    struct timex offset = {.modes = ADJ_SETOFFSET}, tick = {.modes = ADJ_TICK, .tick = 10000};
    struct rlimit core = {1 << 20, 1 << 20}, old;
    struct sched_param first = {1};
    struct sock_filter pass[] = {{6, 0, 0, SECCOMP_RET_ALLOW}};
    struct sock_fprog program = {1, pass};
    union bpf_attr map = {.map_type = 2, .key_size = 4, .value_size = 4, .max_entries = 1};
    struct perf_event_attr counter = {.type = 1, .size = sizeof(counter), .exclude_kernel = 1};
    char name[65] = {0}, letter = 'x';

    for (size_t i = 0; i < sizeof(settings) / sizeof(*settings); i++)
        out(writes(settings[i]), settings[i]);
    out(clock_adjtime(CLOCK_REALTIME, &offset), "moving the clock");
    out(adjtimex(&tick), "the clock's pace");
    out_at(syscall(SYS_clock_settime, 0, 8), EFAULT, "setting a clock");
    out_at(syscall(SYS_settimeofday, 8, 0), EFAULT, "setting the clock");
    out(changes_interface(), "network interfaces");
    out(sched_setscheduler(0, SCHED_FIFO, &first), "going first");
    out(setpriority(PRIO_PROCESS, 0, -5), "going before others");
    getrlimit(RLIMIT_NOFILE, &old);
    old.rlim_cur = ++old.rlim_max;
    out(setrlimit(RLIMIT_NOFILE, &old), "higher limits");
    out(setrlimit(RLIMIT_CORE, &core), "cores");
    out(prlimit(getpid(), RLIMIT_CORE, &core, NULL), "cores by number");
    out(syscall(SYS_bpf, 0, &map, sizeof(map)), "a program in the kernel");
    out(syscall(SYS_perf_event_open, &counter, 0, -1, -1, 0), "counters");
    out(syscall(SYS_perf_event_open, &counter, outside, -1, -1, 0), "another's counters");
    out(syscall(SYS_userfaultfd, 1), "memory that never comes");
    out(syscall(SYS_add_key, "user", "orrery", "x", 1, -3), "a key");
    out(syscall(SYS_keyctl, 0, -3, 0), "a keyring");
    out_at(syscall(SYS_request_key, "user", "orrery", 0, -3), ENOKEY, "another's key");
    gethostname(name, 64);
    out(sethostname(name, strlen(name)), "the machine's name");
    getdomainname(name, 64);
    out(setdomainname(name, strlen(name)), "the machine's domain");
    out(syscall(SYS_syslog, 3, name, 64), "the kernel's log");
#ifdef __x86_64__
    out(syscall(SYS_iopl, 3), "ports");
    out(syscall(SYS_ioperm, 0x80, 1, 1), "a port");
#endif
    out_at(syscall(SYS_acct, "/none"), ENOENT, "accounting");
    out_at(syscall(SYS_swapoff, "/none"), ENOENT, "swapping");
    out_at(syscall(SYS_delete_module, "none", 0), ENOENT, "removing a module");
    out_at(syscall(SYS_finit_module, -1, "", 0), EBADF, "loading a module");
    out_at(syscall(SYS_kexec_load, 0, 0, 0, 1 << 20), EINVAL, "another kernel");
    out_at(syscall(SYS_reboot, 1, 2, 3, 0), EINVAL, "a restart");
    out_at(syscall(SYS_quotactl, 0x80000700, "/none", 0, 0), ENOENT, "quotas");
    out(syscall(SYS_fanotify_init, 0, 0), "watching all files");
    out(syscall(SYS_vhangup), "hanging up");
    out(ioctl(0, TIOCSTI, &letter), "typing into the terminal");
    out(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &program),
        "a listener of its own");
    out(prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, 25, 0, 0), "a capability for what is executed");
    may(syscall(SYS_adjtimex, memset(&offset, 0, sizeof(offset))), "looking at the clock");
    may(clock_gettime(CLOCK_REALTIME, &(struct timespec){0}), "the time");
    may(ftruncate(memfd_create("mine", 0), 5), "memory of its own");
}

/* In a child, which ends with 0 where the program was executed. */
static long runs(int fd, const char *path, char *const arguments[]) {
    char *none[] = {NULL};
    pid_t child = fork();
    int status;

    if (child == 0) {
        close(1);
        close(2);
        if (fd >= 0)
            syscall(SYS_execveat, fd, "", arguments, none, AT_EMPTY_PATH);
        else
            execve(path, arguments, none);
        _exit(99);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0 ? 0 : -1;
}

static void executions(void) {
    char bytes[65536], *itself[] = {"escape", "executed", NULL}, *identity[] = {"id", NULL};
    const char *copied = text("%s/copy", work);
    int from = open("/proc/self/exe", O_RDONLY), memory = memfd_create("program", 0);
    int copy = open(copied, O_WRONLY | O_CREAT, 0755);
    ssize_t count;

    while ((count = read(from, bytes, sizeof(bytes))) > 0)
        if (write(memory, bytes, (size_t)count) != count || write(copy, bytes, (size_t)count) != count)
            broken("cannot even copy");
    close(copy);
    out(runs(memory, NULL, itself), "executing memory");
    out(runs(-1, copied, itself), "executing a copy");
    out(runs(open(copied, O_RDONLY), NULL, itself), "executing a copy by descriptor");
    out(runs(-1, "/usr/bin/id", identity), "executing what is not listed");
}

static void all(void) {
    names();
    spaces();
    processes();
    addresses();
    controls();
    executions();
    printf("%d tries, %d ways\n", tries, ways);
    if (ways != 0)
        _exit(1);
}

int main(int count, char **arguments) {
    static const struct attack attacks[] = {{"all", all}};

    if (count == 2 && strcmp(arguments[1], "executed") == 0)
        return 0;
    if (count != 8)
        return 2;
    /* What was found is told even by a program that is killed. */
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    outside = atoi(arguments[4]);
    socket_path = arguments[5];
    socket_name = arguments[6];
    port = atoi(arguments[7]);
    signal(SIGPIPE, SIG_IGN);
    return attack(attacks, 1, count, arguments);
}
