// Random calls in several threads while signals arrive: guest SEED ROUNDS. Counts what it calls, and says at the end how
// often it called what; says at once what did not return what it has to. Calls are made at places of many kinds: by the C
// library, by syscall(3), and by instructions of its own, with and without a jump to the call instruction itself.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/times.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, NUMBERS = 512 };
// Shared with children, so that theirs are counted, too.
static long *called;
static pid_t parent;
static __thread volatile sig_atomic_t depth;

static void note(long number) { __atomic_fetch_add(&called[number], 1, __ATOMIC_RELAXED); }

static void wrong(const char *what, long got) {
    printf("wrong: %s gave %ld\n", what, got);
    exit(3);
}

#define SITE(name, number)                                                                                   \
    static long name(void) {                                                                                 \
        long result;                                                                                         \
        __asm__ volatile("mov $" #number ", %%eax\n\tsyscall" : "=a"(result) : : "rcx", "r11", "memory");    \
        return result;                                                                                       \
    }
SITE(own_getppid, 110)
SITE(own_getpgrp, 111)
SITE(own_getuid, 102)

// The first call goes through the mov, the others jump to the call instruction.
static long jumped(void) {
    long result;
    __asm__ volatile("mov $3, %%edx\n\tmov $110, %%eax\n\t1: syscall\n\tdec %%edx\n\tjz 2f\n\tmov $110, "
                     "%%eax\n\tjmp 1b\n\t2:"
                     : "=a"(result)
                     :
                     : "rcx", "rdx", "r11", "memory", "cc");
    return result;
}

// A page of code made while running, and made anew.
static long made(int fd) {
    static const unsigned char code[] = {0xb8, 110, 0, 0, 0, 0x0f, 0x05, 0xc3};
    (void)fd;
    unsigned char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(page, code, sizeof code);
    mprotect(page, 4096, PROT_READ | PROT_EXEC);
    long (*call)(void);
    memcpy(&call, &page, sizeof call);
    long result = 0;
    for (int i = 0; i < 30; i++)
        result = call();
    munmap(page, 4096);
    return result;
}

static void handler(int signal) {
    int saved = errno;
    (void)signal;
    note(SYS_getppid);
    if (getppid() != parent)
        wrong("getppid in a handler", 0);
    if (depth < 3) {
        depth++;
        note(SYS_getpgrp);
        own_getpgrp();
        depth--;
    }
    errno = saved;
}

static void step(uint64_t *state, int null, int zero) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    struct rusage usage;
    char bytes[64];
    long got;
    switch (*state % 17) {
    case 0:
        note(SYS_getppid);
        if ((got = own_getppid()) != parent)
            wrong("getppid by itself", got);
        break;
    case 1:
        note(SYS_getppid), note(SYS_getppid), note(SYS_getppid);
        if ((got = jumped()) != parent)
            wrong("getppid by a jump", got);
        break;
    case 2:
        note(SYS_getuid);
        if ((got = own_getuid()) != (long)getuid() + 0 * (note(SYS_getuid), 0))
            wrong("getuid", got);
        break;
    case 3:
        note(SYS_getppid);
        if ((got = syscall(SYS_getppid)) != parent)
            wrong("getppid by syscall", got);
        break;
    case 4:
        note(SYS_write);
        if ((got = write(null, bytes, 7)) != 7)
            wrong("write", got);
        break;
    case 5:
        note(SYS_read);
        if ((got = read(zero, bytes, 9)) != 9)
            wrong("read", got);
        break;
    case 6:
        note(SYS_lseek);
        if ((got = lseek(-1, 0, SEEK_SET)) != -1 || errno != EBADF)
            wrong("lseek", got);
        break;
    case 7:
        note(SYS_getrusage);
        if ((got = getrusage(RUSAGE_SELF, &usage)) != 0)
            wrong("getrusage", got);
        break;
    case 8:
        note(SYS_getrusage);
        if ((got = getrusage(77, &usage)) != -1 || errno != EINVAL)
            wrong("getrusage of nobody", got);
        break;
    case 9:
        note(SYS_times);
        times((struct tms *)(void *)bytes);
        break;
    case 10:
        note(SYS_sched_yield);
        sched_yield();
        break;
    case 11: {
        sigset_t all, old, now;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        note(SYS_getpgrp);
        own_getpgrp();
        pthread_sigmask(SIG_SETMASK, &old, &now);
        if (!sigismember(&now, SIGUSR1))
            wrong("pthread_sigmask", 0);
        break;
    }
    case 12:
        if (*state >> 32 & 3)
            break;
        for (int i = 0; i < 30; i++)
            note(SYS_getppid);
        if ((got = made(null)) != parent)
            wrong("getppid by code made now", got);
        break;
    case 13: {
        if (*state >> 32 & 15)
            break;
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0; i < 40; i++)
                note(SYS_getuid), own_getuid();
            _exit(42);
        }
        int status;
        while (waitpid(pid, &status, 0) < 0)
            if (errno != EINTR)
                wrong("waitpid", errno);
        if (WEXITSTATUS(status) != 42)
            wrong("a child", status);
        break;
    }
    case 14: {
        if (*state >> 32 & 15)
            break;
        pid_t pid = vfork();
        if (pid == 0) {
            note(SYS_getuid);
            own_getuid();
            _exit(43);
        }
        int status;
        while (waitpid(pid, &status, 0) < 0)
            if (errno != EINTR)
                wrong("waitpid", errno);
        if (WEXITSTATUS(status) != 43)
            wrong("a child that shared memory", status);
        break;
    }
    case 15:
        note(SYS_tgkill);
        syscall(SYS_tgkill, getpid(), gettid(), SIGUSR2);
        break;
    default: {
        struct timespec soon = {0, 20000};
        note(SYS_nanosleep);
        syscall(SYS_nanosleep, &soon, NULL);
    }
    }
}

struct work {
    uint64_t seed;
    long rounds;
};

static void *run(void *argument) {
    struct work *work = argument;
    int null = open("/dev/null", O_WRONLY), zero = open("/dev/zero", O_RDONLY);
    uint64_t state = work->seed;
    for (long i = 0; i < work->rounds; i++)
        step(&state, null, zero);
    close(null);
    close(zero);
    return NULL;
}

int main(int count, char **words) {
    if (count != 3)
        return 2;
    parent = getppid();
    called = mmap(NULL, sizeof(long[NUMBERS]), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    note(SYS_getppid);
    struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGUSR1, &action, NULL);
    action.sa_flags = SA_RESTART | SA_NODEFER;
    sigaction(SIGUSR2, &action, NULL);
    timer_t timer;
    timer_create(CLOCK_MONOTONIC, NULL, &timer);
    struct itimerspec often = {{0, 700000}, {0, 700000}};
    timer_settime(timer, 0, &often, NULL);
    pthread_t threads[THREADS];
    struct work work[THREADS];
    for (int i = 0; i < THREADS; i++) {
        work[i] =
            (struct work){strtoull(words[1], NULL, 0) * 0x9e3779b97f4a7c15 + (uint64_t)i + 1, atol(words[2])};
        pthread_create(&threads[i], NULL, run, &work[i]);
    }
    for (int i = 0; i < 200; i++) {
        usleep(300);
        pthread_kill(threads[i % THREADS], 0);
        kill(getpid(), SIGUSR1);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    timer_delete(timer);
    signal(SIGUSR1, SIG_IGN);
    for (int i = 0; i < NUMBERS; i++)
        if (called[i])
            printf("%d %ld\n", i, called[i]);
    return 0;
}
