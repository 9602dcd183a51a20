/* Gets signals of many kinds, and ends by one: what `orrery trace` tells of them is compared with what strace does. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static sigjmp_buf back;

static void handle(int signal) { (void)signal; }

static void jump(int signal) { siglongjmp(back, signal); }

static void on(int signal, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};

    if (sigaction(signal, &action, NULL) != 0)
        exit(1);
}

int main(void) {
    int handled[] = {SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM, SIGTERM, SIGWINCH, SIGRTMIN + 1};
    union sigval value = {.sival_int = 5};
    struct itimerval once = {.it_value = {.tv_usec = 1000}};
    struct sigevent event = {
        .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value = {.sival_int = 9}};
    struct itimerspec soon = {.it_value = {.tv_nsec = 1000000}};
    struct sigaction old;
    size_t size = (size_t)sysconf(_SC_SIGSTKSZ);
    stack_t stack = {.ss_sp = malloc(size), .ss_size = size};
    sigset_t all, none;
    timer_t timer;
    pid_t child;

    for (size_t i = 0; i < sizeof(handled) / sizeof(*handled); i++)
        on(handled[i], handle, SA_RESTART);
    /* Actions are as the program set them. */
    if (sigaction(SIGUSR1, NULL, &old) != 0 || old.sa_handler != handle || old.sa_flags & SA_SIGINFO)
        return 2;
    raise(SIGUSR1);
    kill(getpid(), SIGUSR2);
    sigqueue(getpid(), SIGTERM, value);
    sigqueue(getpid(), SIGRTMIN + 1, value);
    value.sival_int = 0;
    sigqueue(getpid(), SIGWINCH, value);
    if ((child = fork()) == 0)
        _exit(3);
    waitpid(child, NULL, 0);
    if ((child = fork()) == 0) {
        signal(SIGTERM, SIG_DFL);
        raise(SIGTERM);
    }
    waitpid(child, NULL, 0);
    /* Signals that wait come in the order of their numbers, in a call that waits for them. */
    sigfillset(&all);
    sigemptyset(&none);
    sigprocmask(SIG_BLOCK, &all, NULL);
    setitimer(ITIMER_REAL, &once, NULL);
    sigsuspend(&none);
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    timer_settime(timer, 0, &soon, NULL);
    sigsuspend(&none);
    sigprocmask(SIG_UNBLOCK, &all, NULL);
    /* Faults, one of them on a stack of its own. */
    sigaltstack(&stack, NULL);
    on(SIGSEGV, jump, SA_ONSTACK);
    on(SIGFPE, jump, 0);
    on(SIGILL, jump, 0);
    on(SIGTRAP, handle, 0);
    if (sigsetjmp(back, 1) == 0)
        *(volatile int *)16 = 1;
    if (sigsetjmp(back, 1) == 0)
        __asm__ volatile("xorl %%edx, %%edx\n\txorl %%ecx, %%ecx\n\tmovl $1, %%eax\n\tidivl %%ecx" ::
                             : "eax", "ecx", "edx");
    if (sigsetjmp(back, 1) == 0)
        __asm__ volatile("ud2");
    __asm__ volatile("int3");
    signal(SIGTERM, SIG_DFL);
    kill(getpid(), SIGTERM);
    pause();
}
