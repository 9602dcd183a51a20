// Signals on alternate stacks that are no larger than they have to be, with a page below that nothing may touch: tracee CASE.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, ROUNDS = 2000, HANDLERS_OWN = 512, OLD_SIGSTKSZ = 8192 };

static int handled;

static long own_getppid(void) {
    long result;
    __asm__ volatile("mov $110, %%eax\n\tsyscall" : "=a"(result) : : "rcx", "r11", "memory");
    return result;
}

static void count(int signal) {
    (void)signal;
    own_getppid();
    __atomic_fetch_add(&handled, 1, __ATOMIC_RELAXED);
}

static void *guarded(size_t size) {
    size_t room = (size + PAGE - 1) / PAGE * PAGE;
    char *start = mmap(NULL, PAGE + room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED || mprotect(start + PAGE, room, PROT_READ | PROT_WRITE))
        return NULL;
    return start + PAGE;
}

static int use(size_t size) {
    stack_t stack = {.ss_sp = guarded(size), .ss_size = size};
    if (!stack.ss_sp || sigaltstack(&stack, NULL)) {
        printf("sigaltstack: %s\n", strerror(errno));
        return 1;
    }
    struct sigaction action = {.sa_handler = count, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGALRM, &action, NULL);
    return 0;
}

// A signal that arrives in a call.
static int one_by_one(size_t size) {
    if (use(size))
        return 1;
    for (int i = 0; i < ROUNDS; i++)
        syscall(SYS_tgkill, getpid(), gettid(), SIGUSR1);
    printf("handled %d\n", handled);
    return 0;
}

// Two at a time, of which one interrupts the other one's handler, or the return from it.
static int two_at_once(size_t size) {
    if (use(size))
        return 1;
    unsigned random = 1;
    struct timespec soon = {0, 10000};
    for (int i = 0; i < ROUNDS; i++) {
        random = random * 1103515245 + 12345;
        struct itimerval timer = {.it_value = {0, 1 + (random >> 16) % 10}};
        setitimer(ITIMER_REAL, &timer, NULL);
        kill(getpid(), SIGUSR1);
        while (__atomic_load_n(&handled, __ATOMIC_RELAXED) < 2 * (i + 1))
            nanosleep(&soon, NULL);
    }
    printf("handled %d\n", handled);
    return 0;
}

int main(int words, char **word) {
    if (words != 2)
        return 2;
    size_t told = getauxval(AT_MINSIGSTKSZ);
    if (!strcmp(word[1], "least"))
        return one_by_one(told + HANDLERS_OWN);
    if (!strcmp(word[1], "twice"))
        return two_at_once(2 * (told + HANDLERS_OWN));
    // What programs used that asked nobody. Where the processor has so many registers that not even two frames fit, no executive
    // fits either.
    if (!strcmp(word[1], "old"))
        return one_by_one(OLD_SIGSTKSZ);
    return 2;
}
