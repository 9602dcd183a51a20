/*
 * What hostile code might try under `orrery run --enforce`: it knows that an executive sits in its address space, and fights that
 * first. Each attack is named on the command line, with a directory to work in and a file that the policy denies. Prints "held"
 * where it got nothing, and what it got otherwise.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/openat2.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "attacker.h"

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif

static int port;

/* A mapping of this process. */
struct range {
    uintptr_t start, end;
    char rights[5];
};

/* The executable mappings that belong to no file, or to a System V segment: the executive is among them. */
static int strange(struct range *found, int most) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int count = 0;

    while (maps && fgets(line, sizeof(line), maps) && count < most) {
        char path[256] = "";
        unsigned long inode;
        struct range *range = &found[count];

        if (sscanf(line, "%lx-%lx %4s %*s %*s %lu %255s", &range->start, &range->end, range->rights, &inode,
                   path) < 4)
            continue;
        if (range->rights[2] == 'x' && ((inode == 0 && path[0] != '[') || !strncmp(path, "/SYSV", 5)))
            count++;
    }
    if (maps)
        fclose(maps);
    return count;
}

/* A `syscall` instruction within a range, followed by anything. */
static uintptr_t find_syscall(const struct range *range) {
    if (range->rights[0] != 'r')
        return 0;
    for (const unsigned char *at = (const unsigned char *)range->start;
         at + 2 < (const unsigned char *)range->end; at++)
        if (at[0] == 0x0f && at[1] == 0x05)
            return (uintptr_t)at;
    return 0;
}

/*
 * Where to go on after a call from the executive's code: what is behind the `syscall` returns to whoever jumped there, faults, or
 * goes astray. Handlers are shown the program's registers, not the executive's, so single steps through it tell nothing.
 */
static sigjmp_buf after_call;

static void come_back(int signal) {
    (void)signal;
    siglongjmp(after_call, 1);
}

static void catch_faults(void) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};
    static char room[65536];
    stack_t stack = {.ss_sp = room, .ss_size = sizeof(room)};
    struct sigaction action = {.sa_handler = come_back, .sa_flags = SA_NODEFER | SA_ONSTACK};

    sigaltstack(&stack, NULL);
    for (size_t at = 0; at < sizeof(faults) / sizeof(*faults); at++)
        sigaction(faults[at], &action, NULL);
}

/* Jumps to a `syscall` instruction of the executive's, with registers of one's own; does not come back but by a fault. */
__attribute__((noreturn)) static void jump_to(uintptr_t instruction, long number, long a, const void *b,
                                              long c, long d) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = 0;

    __asm__ volatile("lea -128(%%rsp), %%rsp\n\t"
                     "lea 1f(%%rip), %%r11\n\t"
                     "push %%r11\n\t"
                     "jmp *%%rbx\n"
                     "1:\n\t"
                     "ud2"
                     :
                     : "a"(number), "D"(a), "S"(b), "d"(c), "b"(instruction), "r"(r10), "r"(r8)
                     : "rcx", "r11", "r9", "memory", "cc");
    __builtin_unreachable();
}

/* The places within a range to call from, but one gate only: each is like the next. */
static int places(const struct range *range, uintptr_t *found, int most) {
    struct range rest = *range;
    uintptr_t instruction, last = 0;
    int count = 0;

    while (count < most && (instruction = find_syscall(&rest))) {
        rest.start = instruction + 2;
        if (instruction - last != 8)
            found[count++] = instruction;
        last = instruction;
    }
    return count;
}

/*
 * Opens a file by a `syscall` instruction of the executive's, in a child that has this process's descriptors: whatever the code
 * behind the instruction does to the child, the descriptor stays. It is the lowest one that was free, or -1.
 */
static int open_from(uintptr_t instruction, const char *path) {
    int next = dup(STDOUT_FILENO), status;
    pid_t child;

    if (next < 0)
        return -1;
    close(next);
    fflush(stdout);
    child = (pid_t)syscall(SYS_clone, CLONE_FILES | SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        signal(SIGALRM, SIG_DFL);
        alarm(2);
        jump_to(instruction, SYS_openat, AT_FDCWD, path, O_RDONLY, 0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        return -1;
    return fcntl(next, F_GETFD) < 0 ? -1 : next;
}

/* Whether a descriptor is one of the directory to work in; closes it. */
static int is_work(int fd) {
    struct stat found, expected;
    int same = fd >= 0 && fstat(fd, &found) == 0 && stat(work, &expected) == 0 &&
               found.st_dev == expected.st_dev && found.st_ino == expected.st_ino;

    if (fd >= 0)
        close(fd);
    return same;
}

/* Calls straight from the executive's range, which the kernel does not dispatch. */
static void from_its_range(void) {
    struct range ranges[64];
    int count = strange(ranges, 64), tried = 0, called = 0;

    for (int at = 0; at < count; at++) {
        uintptr_t found[24];
        int here = places(&ranges[at], found, 24);

        for (int place = 0; place < here; place++)
            if (is_work(open_from(found[place], work))) {
                called++;
                examine(open_from(found[place], secret), "a call from the executive's range");
            }
        tried += here;
    }
    if (called)
        printf("called from its range; ");
    printf("%d places tried, %d of them made calls; ", tried, called);
}

/* A call by an instruction that nothing else uses, so that nobody has rewritten it. */
static inline __attribute__((always_inline)) long fresh_call(long number, long a, const void *b,
                                                             const void *c, long d) {
    long result = number;
    register long r10 __asm__("r10") = d;

    __asm__ volatile("syscall" : "+a"(result) : "D"(a), "S"(b), "d"(c), "r"(r10) : "rcx", "r11", "memory");
    return result;
}

/* In a child: turns dispatch off from within the executive. 0 if that did nothing. */
static int dispatch_off(uintptr_t instruction) {
    /* What the kernel has for a handler: the function itself, and not the program's, if the executive is not asked. */
    struct {
        void (*handler)(int);
        unsigned long flags;
        void (*restorer)(void);
        uint64_t mask;
    } known = {0};

    signal(SIGALRM, SIG_DFL);
    alarm(2);
    catch_faults();
    if (sigsetjmp(after_call, 1) == 0)
        jump_to(instruction, SYS_prctl, PR_SET_SYSCALL_USER_DISPATCH, NULL, 0, 0);
    if (fresh_call(SYS_rt_sigaction, SIGSEGV, NULL, &known, 8) != 0 || known.handler == come_back)
        return 0;
    examine((int)fresh_call(SYS_openat, AT_FDCWD, secret, (void *)O_RDONLY, 0),
            "dispatch was turned off from within");
    examine((int)fresh_call(SYS_openat2, AT_FDCWD, secret, &(struct open_how){0}, sizeof(struct open_how)),
            "openat2 without dispatch");
    return 1;
}

/* Takes the kernel's dispatch away. */
static void without_dispatch(void) {
    prctl(PR_SET_SYSCALL_USER_DISPATCH, 0, 0, 0, 0);
    examine(open(secret, O_RDONLY), "dispatch was turned off");
    /* A selector of one's own, which lets everything pass. */
    static char selector = 0;
    prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, &selector);
    examine(open(secret, O_RDONLY), "the selector was exchanged");
    struct range ranges[64];
    int count = strange(ranges, 64);
    for (int at = 0; at < count; at++) {
        uintptr_t found[24];
        int here = places(&ranges[at], found, 24);

        for (int place = 0; place < here; place++) {
            int status;
            pid_t child;

            fflush(stdout);
            child = fork();
            if (child == 0)
                _exit(dispatch_off(found[place]) ? 5 : 0);
            if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status))
                continue;
            if (WEXITSTATUS(status) == 1)
                _exit(1);
            if (WEXITSTATUS(status) == 5) {
                printf("dispatch is off; ");
                return;
            }
        }
    }
}

/* Removes the executive, or writes over it. */
static void unmap_it(void) {
    struct range ranges[64];
    int count = strange(ranges, 64);
    pid_t child;
    int status;

    /* A process that does so may well die of it; it must not get anything first. */
    child = fork();
    if (child == 0) {
        for (int at = 0; at < count; at++) {
            mprotect((void *)ranges[at].start, ranges[at].end - ranges[at].start,
                     PROT_READ | PROT_WRITE | PROT_EXEC);
            munmap((void *)ranges[at].start, ranges[at].end - ranges[at].start);
        }
        examine(open(secret, O_RDONLY), "the executive was unmapped");
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status))
        broken("in a child without executive");
    child = fork();
    if (child == 0) {
        int memory = open("/proc/self/mem", O_RDWR);

        for (int at = 0; at < count; at++)
            for (uintptr_t page = ranges[at].start; page < ranges[at].end; page += 4096) {
                static const char nothing[4096];
                if (memory >= 0 && pwrite(memory, nothing, sizeof(nothing), (off_t)page) < 0)
                    break;
            }
        examine(open(secret, O_RDONLY), "the executive was overwritten");
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status))
        broken("in a child with another executive");
}

/* Plays with the signal by which calls arrive at the executive. */
static void sigsys_games(void) {
    sigset_t all;
    struct sigaction action = {.sa_handler = SIG_IGN};
    pid_t child = fork();
    int status;

    if (child == 0) {
        sigfillset(&all);
        sigprocmask(SIG_BLOCK, &all, NULL);
        examine(open(secret, O_RDONLY), "SIGSYS was blocked");
        sigaction(SIGSYS, &action, NULL);
        examine(open(secret, O_RDONLY), "SIGSYS was ignored");
        for (int round = 0; round < 100; round++) {
            raise(SIGSYS);
            examine((int)syscall(SYS_open, secret, O_RDONLY), "amid false SIGSYS");
        }
        _exit(0);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status))
        broken("with SIGSYS exchanged");
}

/* Code of one's own: never seen by the executive, patched while it runs, in other numbers' clothes. */
static void own_code(void) {
    /* mov %rdi,%rax; mov %rsi,%rdi; mov %rdx,%rsi; mov %rcx,%rdx; mov %r8,%r10; syscall; ret */
    static const unsigned char text[] = {0x48, 0x89, 0xf8, 0x48, 0x89, 0xf7, 0x48, 0x89, 0xd6,
                                         0x48, 0x89, 0xca, 0x4d, 0x89, 0xc2, 0x0f, 0x05, 0xc3};
    unsigned char *code =
        mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    long (*made)(long, long, long, long, long) = NULL;
    long result;

    if (code == MAP_FAILED)
        return;
    memcpy(code, text, sizeof(text));
    memcpy(&made, &code, sizeof(made));
    for (int round = 0; round < 100; round++) {
        examine((int)made(SYS_open, (long)secret, O_RDONLY, 0, 0), "code made at run time");
        examine((int)made(SYS_openat, AT_FDCWD, (long)secret, O_RDONLY, 0), "openat made at run time");
    }
    /* The 32-bit and the x32 interface. */
    void *low = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
    if (low != MAP_FAILED) {
        strcpy(low, secret);
        __asm__ volatile("int $0x80"
                         : "=a"(result)
                         : "a"(5), "b"(low), "c"(0), "d"(0)
                         : "memory", "r8", "r9", "r10", "r11");
        examine((int)result, "int 0x80");
    }
    examine((int)made(0x40000000 | SYS_open, (long)secret, O_RDONLY, 0, 0), "x32");
    /* A number that nobody knows yet. */
    if (made(1000, (long)secret, 0, 0, 0) >= 0)
        broken("a call without a name");
}

static atomic_int stop;
static char racing[PATH_MAX];

static void *swap_bytes(void *good) {
    while (!atomic_load(&stop)) {
        memcpy(racing, good, strlen(good) + 1);
        memcpy(racing, secret, strlen(secret) + 1);
    }
    return NULL;
}

/* The executive looks at the path, then the path changes. */
static void race(void) {
    char good[PATH_MAX];
    pthread_t thread;
    struct timespec begin, now;
    long opened = 0;

    snprintf(good, sizeof(good), "%s/public", work);
    close(open(good, O_CREAT | O_WRONLY, 0644));
    pthread_create(&thread, NULL, swap_bytes, good);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        int fd = open(racing, O_RDONLY);

        opened += fd >= 0;
        examine(fd, "the path was exchanged");
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) / 1e9 < 0.4);
    atomic_store(&stop, 1);
    pthread_join(thread, NULL);
    if (!opened)
        broken("not even the good path was opened");
}

/* Other names for the same file. */
static void names(void) {
    char path[PATH_MAX], other[PATH_MAX], folder[PATH_MAX];
    const char *slash = strrchr(secret, '/');
    int fd;

    snprintf(folder, sizeof(folder), "%.*s", (int)(slash - secret), secret);
    snprintf(path, sizeof(path), "%s/link", work);
    unlink(path);
    if (symlink(secret, path) == 0)
        examine(open(path, O_RDONLY), "a symbolic link");
    unlink(path);
    if (symlink(folder, path) == 0) {
        snprintf(other, sizeof(other), "%s/link%s", work, slash);
        examine(open(other, O_RDONLY), "a link to the directory");
    }
    unlink(path);
    if (link(secret, path) == 0)
        examine(open(path, O_RDONLY), "a hard link");
    if (rename(secret, path) == 0)
        broken("it was renamed");
    if (rename(folder, path) == 0) {
        snprintf(other, sizeof(other), "%s/link%s", work, slash);
        examine(open(other, O_RDONLY), "its directory was renamed");
    }
    /* The directory above both. */
    snprintf(other, sizeof(other), "%.*s", (int)(strrchr(folder, '/') - folder), folder);
    snprintf(path, sizeof(path), "%.*s-moved", (int)(strrchr(folder, '/') - folder), folder);
    if (rename(other, path) == 0)
        broken("the directory above was renamed");
    if (chdir(folder) == 0)
        examine(open(slash + 1, O_RDONLY), "a relative path");
    snprintf(path, sizeof(path), "/proc/self/root%s", secret);
    examine(open(path, O_RDONLY), "/proc/self/root");
    snprintf(path, sizeof(path), "/proc/self/cwd%s", slash);
    examine(open(path, O_RDONLY), "/proc/self/cwd");
    fd = open(folder, O_PATH);
    examine(openat(fd, slash + 1, O_RDONLY), "a descriptor of the directory");
    snprintf(path, sizeof(path), "/proc/self/fd/%d%s", fd, slash);
    examine(open(path, O_RDONLY), "a link to a descriptor");
    fd = open(secret, O_PATH);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    examine(open(path, O_RDONLY), "a descriptor that only stands for it");
    if (truncate(secret, 0) == 0 || unlink(secret) == 0 || chmod(secret, 0777) == 0)
        broken("it was changed");
}

/* The board and the supervisor: shared memory in which guests can write, and a process that traces. */
static void supervisor(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    pid_t outside = getppid();

    while (maps && fgets(line, sizeof(line), maps)) {
        unsigned long start, end;
        char rights[5];

        if (!strstr(line, "SYSV") || sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 ||
            rights[1] != 'w')
            continue;
        /* Every word in it becomes the number of a process outside: whoever is asked must not touch that. The lowest bits
           differ, since in some words they mean something. */
        for (unsigned long at = start; at + 4 <= end && at < start + 65536; at += 4)
            if (*(volatile uint32_t *)at == 0)
                *(volatile uint32_t *)at = (uint32_t)outside ^ (uint32_t)(at / 4 % 8);
    }
    if (maps)
        fclose(maps);
    if (ptrace(PTRACE_SEIZE, outside, 0, 0) == 0)
        broken("the monitor can be traced");
    if (kill(outside, 0) == 0)
        broken("the monitor can be signalled");
    struct iovec local = {line, sizeof(line)}, remote = {(void *)0x10000, 8};
    if (process_vm_readv(outside, &local, 1, &remote, 1, 0) >= 0)
        broken("the monitor's memory can be read");
    /* Executed by a supervisor that was told nonsense, or by none: under the same rules. */
    pid_t child = fork();
    int status;
    if (child == 0) {
        execl("/bin/cat", "cat", secret, NULL);
        _exit(3);
    }
    waitpid(child, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        broken("another program read it");
}

/* Addresses: a fourth argument is a port that must not be reached. */
static void addresses(void) {
    struct sockaddr_in to = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    struct sockaddr_in6 mapped = {.sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port)};
    struct iovec part = {"x", 1};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0)
        broken("it connected");
    to.sin_addr.s_addr = htonl(INADDR_ANY);
    if (connect(fd, (struct sockaddr *)&to, sizeof(to)) == 0)
        broken("it connected to no address, which is its own");
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (sendto(fd, "x", 1, MSG_FASTOPEN, (struct sockaddr *)&to, sizeof(to)) >= 0)
        broken("it connected while sending");
    inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr);
    fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&mapped, sizeof(mapped)) == 0)
        broken("it connected by IPv6");
    fd = socket(AF_INET, SOCK_DGRAM, 0);
    if (sendto(fd, "x", 1, 0, (struct sockaddr *)&to, sizeof(to)) >= 0)
        broken("it sent a datagram");
    struct msghdr message = {.msg_name = &to, .msg_namelen = sizeof(to), .msg_iov = &part, .msg_iovlen = 1};
    if (sendmsg(fd, &message, 0) >= 0)
        broken("it sent a message");
    if (socket(AF_INET, SOCK_RAW, IPPROTO_RAW) >= 0 || socket(AF_PACKET, SOCK_RAW, 0) >= 0)
        broken("it has a raw socket");
    if (socket(AF_INET, SOCK_STREAM, 132) >= 0)
        broken("it has a socket that connects by options");
    struct mmsghdr several = {.msg_hdr = message};
    if (sendmmsg(fd, &several, 1, 0) >= 0)
        broken("it sent several messages");
}

int main(int count, char **arguments) {
    static const struct attack attacks[] = {
        {"range", from_its_range}, {"dispatch", without_dispatch},
        {"unmap", unmap_it},       {"sigsys", sigsys_games},
        {"code", own_code},        {"race", race},
        {"names", names},          {"supervisor", supervisor},
        {"addresses", addresses},
    };

    port = count > 4 ? atoi(arguments[4]) : 0;
    return attack(attacks, sizeof(attacks) / sizeof(*attacks), count, arguments);
}
