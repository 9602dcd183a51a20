/*
 * Threads that do what an attachment could disturb, until standard input is closed; each compares what it finds with what it must be.
 * Prints "ready", and in the end "right" or what was wrong. With an
 * argument, a thread blocks SIGSYS as well.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

static atomic_int ending, failures, usr1, sys;

#define MUST(condition)                                                                                      \
    do {                                                                                                     \
        if (!(condition) && atomic_fetch_add(&failures, 1) < 5)                                              \
            printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno);                                 \
    } while (0)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

/* Vector registers and flags, which no system call touches. */
static void *computes(void *unused) {
    uint64_t in[4] = {0x0123456789abcdef, 0xfedcba9876543210, 0x5555aaaa5555aaaa, 0x1122334455667788}, out[4];
    (void)unused;
    while (!ending) {
        uint64_t turns = 20000000, carried = 0;
        memset(out, 0, sizeof out);
        __asm__ volatile("movdqu (%[in]), %%xmm14\n"
                         "movdqu 16(%[in]), %%xmm3\n"
                         "stc\n"
                         "1: lea -1(%[turns]), %[turns]\n"
                         "mov %[turns], %%rcx\n"
                         "jrcxz 2f\n"
                         "jmp 1b\n"
                         "2: adc $0, %[carried]\n"
                         "movdqu %%xmm14, (%[out])\n"
                         "movdqu %%xmm3, 16(%[out])\n"
                         : [turns] "+r"(turns), [carried] "+r"(carried)
                         : [in] "r"(in), [out] "r"(out)
                         : "xmm14", "xmm3", "rcx", "cc", "memory");
        MUST(memcmp(in, out, sizeof in) == 0);
        MUST(carried == 1);
    }
    return NULL;
}

static void *sleeps(void *unused) {
    (void)unused;
    while (!ending) {
        double begin = now();
        MUST(usleep(20000) == 0);
        MUST(now() - begin >= 0.02);
        begin = now();
        MUST(poll(NULL, 0, 30) == 0);
        MUST(now() - begin >= 0.029);
    }
    return NULL;
}

static void *waits(void *unused) {
    int queue = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event;
    (void)unused;
    while (!ending) {
        /* As for any tracer: see BUGS in ptrace(2). */
        int count = epoll_wait(queue, &event, 1, 15);
        MUST(count == 0 || (count == -1 && errno == EINTR));
    }
    close(queue);
    return NULL;
}

static int pipes[2];

static void *writes(void *unused) {
    (void)unused;
    for (uint32_t number = 0; !ending; number++) {
        MUST(write(pipes[1], &number, sizeof number) == sizeof number);
        usleep(3000);
    }
    close(pipes[1]);
    return NULL;
}

static void *reads(void *unused) {
    uint32_t number;
    ssize_t length;
    (void)unused;
    for (uint32_t next = 0; (length = read(pipes[0], &number, sizeof number)) != 0; next++)
        MUST(length == sizeof number && number == next);
    return NULL;
}

static void *starts(void *unused) {
    char *const arguments[] = {"true", NULL};
    (void)unused;
    while (!ending) {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(getppid() > 0 ? 7 : 8);
        MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 7);
        MUST(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
        MUST(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
        usleep(10000);
    }
    return NULL;
}

static void on_usr1(int signal) {
    (void)signal;
    usr1++;
}

static void on_sys(int signal) {
    (void)signal;
    sys++;
}

static void *signals(void *unused) {
    (void)unused;
    for (int round = 1; !ending; round++) {
        MUST(pthread_kill(pthread_self(), SIGUSR1) == 0);
        MUST(usr1 == round);
        usleep(5000);
    }
    return NULL;
}

/* SIGSYS belongs to the program, too: blocked, kept pending, delivered once. */
static void *blocks(void *unused) {
    sigset_t set, before;
    (void)unused;
    sigemptyset(&set);
    sigaddset(&set, SIGSYS);
    for (int round = 1; !ending; round++) {
        MUST(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
        MUST(pthread_kill(pthread_self(), SIGSYS) == 0);
        usleep(10000);
        MUST(sys == round - 1);
        MUST(sigpending(&before) == 0 && sigismember(&before, SIGSYS));
        MUST(pthread_sigmask(SIG_UNBLOCK, &set, &before) == 0);
        MUST(sigismember(&before, SIGSYS));
        MUST(sys == round);
        usleep(5000);
    }
    return NULL;
}

/* As in Go: a small stack, and a roomy one for signals. */
static void *has_small_stack(void *unused) {
    stack_t roomy = {.ss_sp = malloc(64 << 10), .ss_size = 64 << 10};
    (void)unused;
    MUST(sigaltstack(&roomy, NULL) == 0);
    while (!ending) {
        MUST(getppid() == (pid_t)syscall(SYS_getppid));
        usleep(2000);
    }
    return NULL;
}

int main(int argc, char **argv) {
    void *(*const bodies[])(void *) = {computes, sleeps,  waits,           writes, reads,
                                       starts,   signals, has_small_stack, blocks};
    enum { MOST = sizeof bodies / sizeof *bodies };
    int count = argc > 1 ? MOST : MOST - 1;
    pthread_t threads[MOST];
    struct sigaction action = {.sa_handler = on_usr1, .sa_flags = SA_RESTART};
    char byte;
    (void)argv;
    MUST(sigaction(SIGUSR1, &action, NULL) == 0);
    action.sa_handler = on_sys;
    MUST(sigaction(SIGSYS, &action, NULL) == 0);
    MUST(pipe(pipes) == 0);
    for (int i = 0; i < count; i++)
        MUST(pthread_create(&threads[i], NULL, bodies[i], NULL) == 0);
    printf("ready\n");
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    ending = 1;
    for (int i = 0; i < count; i++)
        pthread_join(threads[i], NULL);
    MUST(sigaction(SIGUSR1, NULL, &action) == 0 && action.sa_handler == on_usr1);
    MUST(sigaction(SIGSYS, NULL, &action) == 0 && action.sa_handler == on_sys);
    if (!failures)
        printf("right\n");
    return failures != 0;
}
