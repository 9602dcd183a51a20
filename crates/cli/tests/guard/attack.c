/*
 * What a program under guard might try. Each attack is named on the command line, with the directory in which it may work
 * and the secret that it must not get. Prints "held" where it got nothing, and what it got otherwise.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attacker.h"

static char here[PATH_MAX];

/* How long races run. */
#define RACE 0.4

static double now(void) {
    struct timespec time;

    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static const char *in_work(const char *name) {
    static char paths[8][PATH_MAX];
    static int next;
    char *path = paths[next++ % 8];

    snprintf(path, PATH_MAX, "%s/%s", work, name);
    return path;
}

static void must_fail(long result, const char *how) {
    if (result >= 0)
        broken(how);
}

static void put(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);

    if (fd < 0 || write(fd, text, strlen(text)) < 0)
        broken("cannot even write where that is allowed");
    close(fd);
}

/* Another thread exchanges the path's bytes while the call is decided. */
static char racing[PATH_MAX];
static atomic_int stop;

static void *swap_bytes(void *unused) {
    char good[PATH_MAX], bad[PATH_MAX];

    (void)unused;
    snprintf(good, sizeof(good), "%s", in_work("public"));
    snprintf(bad, sizeof(bad), "%s", secret);
    while (!atomic_load(&stop)) {
        memcpy(racing, good, sizeof(racing));
        memcpy(racing, bad, sizeof(racing));
    }
    return NULL;
}

static void race_path(void) {
    pthread_t thread;
    double end = now() + RACE;
    long opened = 0;

    put(in_work("public"), "public");
    pthread_create(&thread, NULL, swap_bytes, NULL);
    while (now() < end) {
        int fd = open(racing, O_RDONLY);

        opened += fd >= 0;
        examine(fd, "the path was exchanged");
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    printf("opened %ld times\n", opened);
}

static void *swap_links(void *unused) {
    const char *link = in_work("link"), *other = in_work("other");

    (void)unused;
    while (!atomic_load(&stop)) {
        unlink(other);
        if (symlink("public", other) == 0)
            rename(other, link);
        unlink(other);
        if (symlink(secret, other) == 0)
            rename(other, link);
    }
    return NULL;
}

static void race_link(void) {
    pthread_t thread;
    double end = now() + RACE;
    char path[PATH_MAX];

    snprintf(path, sizeof(path), "%s/link", work);
    put(in_work("public"), "public");
    pthread_create(&thread, NULL, swap_links, NULL);
    while (now() < end)
        examine(open(path, O_RDONLY), "the link was exchanged");
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
}

static void *swap_directories(void *unused) {
    char a[PATH_MAX], b[PATH_MAX];

    (void)unused;
    snprintf(a, sizeof(a), "%s/a", work);
    snprintf(b, sizeof(b), "%s/b", work);
    while (!atomic_load(&stop))
        syscall(SYS_renameat2, AT_FDCWD, a, AT_FDCWD, b, 2 /* RENAME_EXCHANGE */);
    return NULL;
}

/* A directory and a link to the secret's directory change places. */
static void race_directory(void) {
    pthread_t thread;
    double end = now() + RACE;
    char folder[PATH_MAX], path[PATH_MAX];
    int fd;

    snprintf(folder, sizeof(folder), "%s", secret);
    *strrchr(folder, '/') = 0;
    mkdir(in_work("a"), 0755);
    put(in_work("a/secret"), "public");
    if (symlink(folder, in_work("b")) != 0)
        broken("cannot make a link");
    snprintf(path, sizeof(path), "%s/a/secret", work);
    pthread_create(&thread, NULL, swap_directories, NULL);
    while (now() < end) {
        examine(open(path, O_RDONLY), "the directory was exchanged");
        fd = open(path, O_WRONLY | O_CREAT, 0644);
        if (fd >= 0) {
            if (write(fd, "public", 6) < 0)
                broken("cannot write");
            close(fd);
        }
        unlink(path);
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    if (access(secret, F_OK) == 0)
        broken("the secret's directory can be looked into");
}

static void names(void) {
    char path[PATH_MAX * 2];
    int fd;
    struct stat status;

    examine(open(secret, O_RDONLY), "its name");
    must_fail(stat(secret, &status), "stat");
    must_fail(access(secret, R_OK), "access");
    must_fail(truncate(secret, 0), "truncate");
    must_fail(chmod(secret, 0777), "chmod");
    must_fail(unlink(secret), "unlink");
    must_fail(rename(secret, in_work("stolen")), "rename");
    must_fail(link(secret, in_work("stolen")), "link");
    must_fail(syscall(SYS_chown, secret, 0, 0), "chown");
    must_fail(open(secret, O_PATH), "O_PATH");
    snprintf(path, sizeof(path), "%s/../../../../../../../../..%s", work, secret);
    examine(open(path, O_RDONLY), "..");
    snprintf(path, sizeof(path), "/proc/self/root%s", secret);
    examine(open(path, O_RDONLY), "/proc/self/root");
    snprintf(path, sizeof(path), "/proc/thread-self/root%s", secret);
    examine(open(path, O_RDONLY), "/proc/thread-self/root");
    snprintf(path, sizeof(path), "/proc/%d/root%s", getppid(), secret);
    examine(open(path, O_RDONLY), "/proc/MONITOR/root");
    snprintf(path, sizeof(path), "/proc/self/cwd/../../../../../../../..%s", secret);
    examine(open(path, O_RDONLY), "/proc/self/cwd");
    fd = open("/", O_PATH | O_DIRECTORY);
    examine(openat(fd, secret + 1, O_RDONLY), "a descriptor of the root");
    snprintf(path, sizeof(path), "/proc/self/fd/%d%s", fd, secret);
    examine(open(path, O_RDONLY), "a descriptor of the root, by /proc");
    if (symlink(secret, in_work("soft")) == 0)
        examine(open(in_work("soft"), O_RDONLY), "a symbolic link");
    must_fail(open(in_work("soft"), O_WRONLY | O_TRUNC), "writing through a symbolic link");
    if (symlink("/proc/self/root", in_work("root")) == 0) {
        snprintf(path, sizeof(path), "%s/root%s", work, secret);
        examine(open(path, O_RDONLY), "a link to /proc/self/root");
    }
    if (chdir("/") == 0)
        examine(open(secret + 1, O_RDONLY), "a relative name");
    struct open_how how = {.flags = O_RDONLY};

    examine((int)syscall(SYS_openat2, AT_FDCWD, secret, &how, sizeof(how)), "openat2");
    how.resolve = RESOLVE_IN_ROOT;
    examine((int)syscall(SYS_openat2, fd, secret, &how, sizeof(how)), "openat2 in a root");
    how.resolve = RESOLVE_BENEATH;
    examine((int)syscall(SYS_openat2, fd, secret + 1, &how, sizeof(how)), "openat2 beneath");
    must_fail(syscall(SYS_name_to_handle_at, AT_FDCWD, secret, path, path + 64, 0), "a handle");
    must_fail(syscall(SYS_open_by_handle_at, AT_FDCWD, path, O_RDONLY), "opening by handle");
}

static void around(void) {
    char stack[256] = {0};

    must_fail(unshare(CLONE_NEWUSER | CLONE_NEWNS), "unshare");
    must_fail(syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0), "clone in a namespace");
    must_fail(syscall(SYS_clone3, stack, 64), "clone3");
    must_fail(mount("/", work, "", MS_BIND, ""), "mount");
    must_fail(umount2("/proc", MNT_DETACH), "umount");
    must_fail(chroot(work), "chroot");
    must_fail(syscall(SYS_pivot_root, work, work), "pivot_root");
    must_fail(syscall(SYS_setns, 0, 0), "setns");
    must_fail(syscall(SYS_open_tree, AT_FDCWD, "/", 1), "open_tree");
    must_fail(syscall(SYS_fsopen, "tmpfs", 0), "fsopen");
    must_fail(syscall(SYS_io_uring_setup, 8, stack), "io_uring");
    must_fail(syscall(SYS_bpf, 0, stack, 64), "bpf");
    must_fail(syscall(SYS_perf_event_open, stack, 0, -1, -1, 0), "perf_event_open");
    must_fail(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, stack),
              "a listener of its own");
    must_fail(syscall(SYS_mknod, in_work("device"), S_IFBLK | 0600, 0x0801), "a device");
    must_fail(syscall(SYS_open | 0x40000000, secret, O_RDONLY), "an x32 call");
#ifdef __x86_64__
    {
        /* The 32-bit interface: open is 5, and the path must be low. */
        char *low = mmap((void *)0x10000000, 4096, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        long result;

        snprintf(low, 4096, "%s", secret);
        __asm__ volatile("int $0x80"
                         : "=a"(result)
                         : "a"(5), "b"(low), "c"(0), "d"(0)
                         : "memory", "r8", "r9", "r10", "r11");
        if (result >= 0 && result < 4096)
            broken("int 0x80");
    }
#endif
}

static void monitor(void) {
    pid_t parent = getppid();
    char path[64], bytes[64];
    struct iovec mine = {bytes, sizeof(bytes)}, theirs = {(void *)0x400000, sizeof(bytes)};
    int handle;

    must_fail(ptrace(PTRACE_ATTACH, parent, 0, 0), "ptrace");
    must_fail(ptrace(PTRACE_SEIZE, parent, 0, 0), "ptrace");
    must_fail(process_vm_readv(parent, &mine, 1, &theirs, 1, 0), "process_vm_readv");
    must_fail(process_vm_writev(parent, &mine, 1, &theirs, 1, 0), "process_vm_writev");
    must_fail(kill(parent, SIGKILL), "kill");
    must_fail(kill(parent, SIGSTOP), "stopping");
    must_fail(syscall(SYS_tkill, parent, SIGKILL), "tkill");
    must_fail(syscall(SYS_tgkill, parent, parent, SIGKILL), "tgkill");
    handle = (int)syscall(SYS_pidfd_open, parent, 0);
    if (handle >= 0) {
        must_fail(syscall(SYS_pidfd_send_signal, handle, SIGKILL, 0, 0), "pidfd_send_signal");
        for (int fd = 0; fd < 64; fd++)
            must_fail(syscall(SYS_pidfd_getfd, handle, fd, 0), "pidfd_getfd");
    }
    for (const char *const *name = (const char *const[]){"mem", "maps", "environ", "fd", "exe", "cwd/x", 0};
         *name; name++) {
        snprintf(path, sizeof(path), "/proc/%d/%s", parent, *name);
        must_fail(open(path, O_RDONLY), path);
        snprintf(path, sizeof(path), "/proc/%d/task/%d/%s", parent, parent, *name);
        must_fail(open(path, O_RDONLY), path);
    }
    must_fail(prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0), "new privileges");
    /* Not even by its group; the program itself is in it. */
    signal(SIGTERM, SIG_IGN);
    kill(0, SIGTERM);
    kill(-1, SIGTERM);
    /* It still answers. */
    put(in_work("after"), "x");
}

static void *swap_programs(void *unused) {
    char good[PATH_MAX], bad[PATH_MAX];

    (void)unused;
    snprintf(good, sizeof(good), "%s", "/bin/true");
    snprintf(bad, sizeof(bad), "%s", in_work("program"));
    while (!atomic_load(&stop)) {
        memcpy(racing, good, sizeof(good));
        memcpy(racing, bad, sizeof(bad));
    }
    return NULL;
}

/* A program that is not listed, copied to where one may write, is executed in the other's place. */
static void execution(void) {
    pthread_t thread;
    double end = now() + RACE;
    const char *program = in_work("program");
    char copy[65536];
    int from = open("/proc/self/exe", O_RDONLY), to = open(program, O_WRONLY | O_CREAT, 0755), count, fd;
    long runs = 0;

    while ((count = (int)read(from, copy, sizeof(copy))) > 0)
        if (write(to, copy, (size_t)count) != count)
            broken("cannot copy");
    close(to);
    snprintf(here, sizeof(here), "%s", program);
    fd = open(here, O_RDONLY);
    pthread_create(&thread, NULL, swap_programs, NULL);
    while (now() < end) {
        pid_t child = fork();
        int status;

        if (child == 0) {
            /* The thread that exchanges lives in the parent: share its memory. */
            _exit(0);
        }
        waitpid(child, &status, 0);
        child = vfork();
        if (child == 0) {
            execl(racing, "program", "executed", work, secret, (char *)0);
            _exit(0);
        }
        waitpid(child, &status, 0);
        runs++;
        if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
            broken("the program was exchanged");
    }
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    must_fail(execl(here, "program", (char *)0), "execve");
    must_fail(syscall(SYS_execveat, fd, "", (char *[]){"x", 0}, (char *[]){0}, AT_EMPTY_PATH), "execveat");
    fd = memfd_create("program", 0);
    must_fail(syscall(SYS_execveat, fd, "", (char *[]){"x", 0}, (char *[]){0}, AT_EMPTY_PATH),
              "execveat of memory");
    printf("%ld runs\n", runs);
}

static void *flooding(void *unused) {
    double end = now() + RACE;
    long count = 0;

    (void)unused;
    while (now() < end) {
        int fd = open(in_work("public"), O_RDONLY);

        if (fd >= 0)
            close(fd);
        count++;
    }
    return (void *)count;
}

static void flood(void) {
    pthread_t threads[32];
    struct rlimit few = {16, 16};
    int last = -1, fd;

    put(in_work("public"), "public");
    for (int i = 0; i < 32; i++)
        pthread_create(&threads[i], NULL, flooding, NULL);
    for (int i = 0; i < 32; i++)
        pthread_join(threads[i], NULL);
    /* The program's own limit holds, and only for itself. */
    setrlimit(RLIMIT_NOFILE, &few);
    while ((fd = open(in_work("public"), O_RDONLY)) >= 0)
        last = fd;
    if (errno != EMFILE || last != 15)
        broken("the limit of descriptors does not hold");
    for (fd = 3; fd < 16; fd++)
        close(fd);
    put(in_work("after"), "x");
}

static void *suddenly(void *unused) {
    (void)unused;
    usleep(1000 + (unsigned int)(now() * 1e6) % 3000);
    _exit(0);
}

/* Processes that end in the midst of calls. */
static void death(void) {
    double end = now() + RACE;

    put(in_work("public"), "public");
    while (now() < end) {
        pid_t child = fork();

        if (child == 0) {
            pthread_t thread;

            pthread_create(&thread, NULL, suddenly, NULL);
            for (;;)
                close(open(in_work("public"), O_RDONLY));
        }
        waitpid(child, NULL, 0);
    }
    put(in_work("after"), "x");
}

static atomic_int handled;

static void handler(int number) {
    (void)number;
    atomic_fetch_add(&handled, 1);
}

/* Signals in the midst of calls: each is done once. */
static void interrupted(void) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    double end = now() + RACE;
    int number = 0, fd;
    char name[64];
    pid_t child, self = getpid();

    sigaction(SIGUSR1, &action, NULL);
    child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        for (;;) {
            kill(self, SIGUSR1);
            usleep(300);
        }
    }
    while (now() < end) {
        snprintf(name, sizeof(name), "once%d", number++);
        fd = open(in_work(name), O_WRONLY | O_CREAT | O_EXCL, 0644);
        if (fd < 0)
            broken(strerror(errno));
        close(fd);
        if (unlink(in_work(name)) != 0)
            broken("removed twice");
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    if (number < 10 || atomic_load(&handled) < 10)
        broken("nothing happened");
}

static void sockets(void) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);

    snprintf(address.sun_path, sizeof(address.sun_path), "%s/socket", work);
    must_fail(connect(fd, (struct sockaddr *)&address, sizeof(address)), "connect");
    must_fail(bind(fd, (struct sockaddr *)&address, sizeof(address)), "bind");
    must_fail(socket(AF_INET, SOCK_DGRAM, 0), "a socket for datagrams");
    must_fail(socket(AF_PACKET, SOCK_RAW, 0), "a raw socket");
    must_fail(sendto(fd, "x", 1, MSG_FASTOPEN, NULL, 0), "fast open");
}

int main(int count, char **arguments) {
    static const struct attack attacks[] = {
        {"race-path", race_path},
        {"race-link", race_link},
        {"race-directory", race_directory},
        {"names", names},
        {"around", around},
        {"monitor", monitor},
        {"execution", execution},
        {"flood", flood},
        {"death", death},
        {"interrupted", interrupted},
        {"sockets", sockets},
    };

    if (count == 4 && strcmp(arguments[1], "executed") == 0)
        return 77;
    return attack(attacks, sizeof(attacks) / sizeof(*attacks), count, arguments);
}
