// Calls that a handler answers, from threads and from signal handlers that interrupt them.
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { THREADS = 4, CALLS = 3000, RANGES = 256 };
static struct { uint64_t start, end; } ranges[RANGES];
static int range_count;
static volatile sig_atomic_t signals, strange, left, wrong;
static __thread sigjmp_buf out;
static __thread volatile sig_atomic_t may_leave;

// The handler of the policy answers with the sum of the numbers from one to this, and this.
static void check(long number) {
    if (syscall(SYS_getpgid, number) != number * (number + 1) / 2 + number)
        wrong = 1;
}

static void on_alarm(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    uint64_t at = ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    int known = 0;
    for (int i = 0; i < range_count; i++)
        known |= at >= ranges[i].start && at < ranges[i].end;
    if (!known)
        strange = 1;
    signals++;
    check(500 + signals % 7);
    if (signals % 16 == 0) {
        pid_t child = fork();
        if (child == 0) {
            check(77);
            _exit(wrong || strange);
        }
        int status = 1;
        if (waitpid(child, &status, 0) != child || status != 0)
            wrong = 1;
    }
    if (signals % 5 == 0 && may_leave) {
        left++;
        siglongjmp(out, 1);
    }
}

static void *calls(void *first) {
    for (volatile long i = 0; i < CALLS; i++) {
        if (sigsetjmp(out, 1) == 0) {
            may_leave = 1;
            check((long)(intptr_t)first + i % 300);
        }
        may_leave = 0;
    }
    return NULL;
}

int main(void) {
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps) && range_count < RANGES) {
        unsigned long start, end;
        char rights[8];
        if (sscanf(line, "%lx-%lx %7s", &start, &end, rights) == 3 && rights[2] == 'x' &&
            (strchr(line, '/') || strstr(line, "[vdso]"))) {
            ranges[range_count].start = start;
            ranges[range_count++].end = end;
        }
    }
    struct sigaction action = {.sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 700}, {0, 700}};
    setitimer(ITIMER_REAL, &timer, NULL);
    pthread_t threads[THREADS];
    for (long i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, calls, (void *)(intptr_t)(100 * i));
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    // Until some have come, on a slow machine, too.
    for (long i = 0; signals < 50 && i < 10000000; i++)
        calls((void *)(intptr_t)7);
    memset(&timer, 0, sizeof timer);
    setitimer(ITIMER_REAL, &timer, NULL);
    printf("%s %s %s\n", wrong ? "wrong" : "right", strange ? "strange" : "known",
           signals >= 50 ? "interrupted" : "alone");
    return 0;
}
