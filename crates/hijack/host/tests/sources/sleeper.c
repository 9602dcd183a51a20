/* What sleeps promise: prints one line for each behaviour, the same whoever performs the sleep. */

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MS 1000000LL

static sigjmp_buf escape;
static volatile int handled;
static int escaping, slow;

static long long shown(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec * 1000 * MS + time.tv_nsec;
}

static struct timespec span(long long nanoseconds) {
    return (struct timespec){nanoseconds / (1000 * MS), nanoseconds % (1000 * MS)};
}

static void spin(long long nanoseconds) {
    for (long long end = shown(CLOCK_MONOTONIC) + nanoseconds; shown(CLOCK_MONOTONIC) < end;)
        ;
}

static void handler(int signal) {
    handled = signal;
    if (slow)
        spin(60 * MS);
    if (escaping)
        siglongjmp(escape, 1);
}

static void handle(int signal, void (*function)(int), int flags) {
    struct sigaction action = {.sa_handler = function, .sa_flags = flags};
    sigaction(signal, &action, NULL);
}

static void alarm_in(long long nanoseconds) {
    struct itimerval timer = {.it_value = {0, nanoseconds / 1000}};
    setitimer(ITIMER_REAL, &timer, NULL);
}

/* The raw call: the C library has its own ideas about clocks and errors. */
static long sleep_for(clockid_t clock, int flags, const void *time, void *left) {
    long result = syscall(SYS_clock_nanosleep, clock, flags, time, left);
    return result < 0 ? -errno : result;
}

static void never_too_short(void) {
    static const clockid_t clocks[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_BOOTTIME, CLOCK_TAI};
    static const long long lengths[] = {1, 1000, 20000, 70000, 300000, 2 * MS};
    int early = 0, wrong = 0;
    for (size_t clock = 0; clock < 4; clock++)
        for (size_t length = 0; length < 6; length++)
            for (int round = 0; round < 20; round++) {
                long long start = shown(clocks[clock]);
                struct timespec time = span(lengths[length]), end = span(start + lengths[length]);
                int absolute = round % 2;
                wrong += sleep_for(clocks[clock], absolute ? TIMER_ABSTIME : 0, absolute ? &end : &time,
                                   NULL) != 0;
                early += shown(clocks[clock]) < start + lengths[length];
            }
    struct timespec time = span(3 * MS);
    long long start = shown(CLOCK_MONOTONIC);
    wrong += nanosleep(&time, NULL) != 0;
    early += shown(CLOCK_MONOTONIC) < start + 3 * MS;
    printf("sleeps: %d early, %d failed\n", early, wrong);
}

static void bad_arguments(void) {
    struct timespec valid = span(MS), zero = span(0), past = span(1);
    struct timespec negative = {-1, 0}, odd = {0, 1000 * MS}, both = {0, -1};
    printf("null: %ld %ld\n", sleep_for(CLOCK_MONOTONIC, 0, NULL, NULL),
           sleep_for(CLOCK_REALTIME, 1, NULL, NULL));
    printf("unmapped: %ld\n", sleep_for(CLOCK_MONOTONIC, 0, (void *)8, NULL));
    printf("negative: %ld %ld %ld\n", sleep_for(CLOCK_MONOTONIC, 0, &negative, NULL),
           sleep_for(CLOCK_MONOTONIC, 0, &odd, NULL), sleep_for(CLOCK_MONOTONIC, 0, &both, NULL));
    printf("no clock: %ld %ld\n", sleep_for(77, 0, &valid, NULL), sleep_for(-1, 0, &valid, NULL));
    printf("own CPU clock: %ld\n", sleep_for(CLOCK_THREAD_CPUTIME_ID, 0, &valid, NULL));
    printf("nothing to wait for: %ld %ld\n", sleep_for(CLOCK_MONOTONIC, 0, &zero, NULL),
           sleep_for(CLOCK_REALTIME, TIMER_ABSTIME, &past, NULL));
    printf("flags: %ld\n", sleep_for(CLOCK_MONOTONIC, 0x40000000, &valid, NULL));
}

static void interrupted(int flags, const char *name) {
    struct timespec time = span(400 * MS), left = span(0);
    handle(SIGALRM, handler, flags);
    handled = 0;
    alarm_in(50 * MS);
    long result = sleep_for(CLOCK_MONOTONIC, 0, &time, &left);
    long long rest = left.tv_sec * 1000 * MS + left.tv_nsec;
    printf("%s: %ld, handled %d, left %s\n", name, result, handled == SIGALRM,
           rest > 100 * MS && rest <= 351 * MS ? "what was left" : "something else");
    alarm_in(20 * MS);
    printf("%s, nowhere to say: %ld\n", name, sleep_for(CLOCK_MONOTONIC, 0, &time, (void *)8));
    alarm_in(20 * MS);
    left = span(77);
    struct timespec end = span(shown(CLOCK_REALTIME) + 400 * MS);
    result = sleep_for(CLOCK_REALTIME, TIMER_ABSTIME, &end, &left);
    printf("%s, absolute: %ld, left %ld\n", name, result, left.tv_nsec);
}

static void slow_handler(void) {
    /* The handler takes longer than what is left: the sleep was interrupted all the same. */
    struct timespec time = span(100 * MS), left = span(0);
    slow = 1;
    alarm_in(60 * MS);
    long result = sleep_for(CLOCK_MONOTONIC, 0, &time, &left);
    slow = 0;
    printf("slow handler: %ld, left %d\n", result, left.tv_nsec > 0 && left.tv_nsec < 41 * MS);
}

static void ignored(void) {
    handle(SIGALRM, SIG_IGN, 0);
    struct timespec time = span(60 * MS);
    long long start = shown(CLOCK_MONOTONIC);
    alarm_in(20 * MS);
    long result = sleep_for(CLOCK_MONOTONIC, 0, &time, NULL);
    printf("ignored: %ld, whole %d\n", result, shown(CLOCK_MONOTONIC) - start >= 60 * MS);
    handle(SIGALRM, handler, 0);
}

static void stopped(void) {
    pid_t child = fork();
    if (child == 0) {
        struct timespec time = span(150 * MS);
        long long start = shown(CLOCK_MONOTONIC);
        long result = sleep_for(CLOCK_MONOTONIC, 0, &time, NULL);
        _exit(result == 0 && shown(CLOCK_MONOTONIC) - start >= 150 * MS ? 0 : 1);
    }
    struct timespec time = span(40 * MS);
    nanosleep(&time, NULL);
    kill(child, SIGSTOP);
    int status;
    waitpid(child, &status, WUNTRACED);
    nanosleep(&time, NULL);
    kill(child, SIGCONT);
    waitpid(child, &status, 0);
    printf("stopped and continued: %d\n", status);
}

static void escaped(void) {
    struct timespec time = span(400 * MS);
    long long start = shown(CLOCK_MONOTONIC);
    escaping = 1;
    if (sigsetjmp(escape, 1) == 0) {
        alarm_in(20 * MS);
        sleep_for(CLOCK_MONOTONIC, 0, &time, NULL);
        printf("not escaped\n");
    }
    escaping = 0;
    sigset_t mask;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    time = span(MS);
    long after = sleep_for(CLOCK_MONOTONIC, 0, &time, NULL);
    printf("escaped: early %d, mask %d, then %ld\n", shown(CLOCK_MONOTONIC) - start < 300 * MS,
           sigismember(&mask, SIGALRM), after);
}

static void *sleeper(void *unused) {
    struct timespec time = span(10000 * MS);
    nanosleep(&time, NULL);
    return unused;
}

static void cancelled(void) {
    pthread_t thread;
    void *result;
    struct timespec time = span(30 * MS);
    pthread_create(&thread, NULL, sleeper, NULL);
    nanosleep(&time, NULL);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("cancelled: %d\n", result == PTHREAD_CANCELED);
}

static void counting(int signal) {
    (void)signal;
    handled++;
}

/* Signals in every part of short sleeps: each is handled, and each sleep is whole or says that it is not. */
static void bombarded(void) {
    handle(SIGALRM, counting, SA_RESTART);
    struct itimerval timer = {{0, 190}, {0, 190}}, none = {{0, 0}, {0, 0}};
    int early = 0, strange = 0;
    handled = 0;
    setitimer(ITIMER_REAL, &timer, NULL);
    for (int round = 0; round < 3000; round++) {
        struct timespec time = span(50000 + round % 7 * 30000), left = span(-1);
        long long start = shown(CLOCK_MONOTONIC), asked = time.tv_nsec;
        int before = handled;
        long result = sleep_for(CLOCK_MONOTONIC, 0, &time, &left);
        long long slept = shown(CLOCK_MONOTONIC) - start;
        if (result == 0)
            early += slept < asked;
        else if (result == -EINTR)
            strange += handled == before || left.tv_nsec <= 0 || left.tv_nsec > asked + 60000;
        else
            strange++;
    }
    setitimer(ITIMER_REAL, &none, NULL);
    printf("bombarded: %d early, %d strange, handled %d\n", early, strange, handled > 100);
}

static void *writes(void *end) {
    spin(30 * MS);
    return write(*(int *)end, "x", 1) == 1 ? NULL : end;
}

static void timeouts(void) {
    int ends[2], set = epoll_create1(0), early = 0;
    if (pipe(ends) != 0)
        return;
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = 77}, events[2] = {{0}};
    struct pollfd asked[] = {{ends[0], POLLIN, 0}, {-1, POLLIN, 7}, {999, POLLIN, 0}};
    epoll_ctl(set, EPOLL_CTL_ADD, ends[0], &event);
    for (int milliseconds = 0; milliseconds < 40; milliseconds += 3) {
        long long start = shown(CLOCK_MONOTONIC);
        early += poll(asked, 2, milliseconds) != 0 || epoll_wait(set, events, 2, milliseconds) != 0;
        early += shown(CLOCK_MONOTONIC) - start < 2 * milliseconds * MS;
    }
    printf("timeouts: %d early, %d %d\n", early, asked[0].revents, asked[1].revents);
    printf("bad: %d", poll(asked, 3, 1000));
    printf(" %d", asked[2].revents);
    printf(" %ld %d", syscall(SYS_poll, 8, 1, 100), errno);
    printf(" %d %d", epoll_wait(set, events, 0, 100), errno);
    printf(" %d %d\n", epoll_wait(999, events, 1, 100), errno);
    alarm_in(20 * MS);
    printf("interrupted: %d %d", poll(asked, 2, 10000), errno);
    alarm_in(20 * MS);
    printf(" %d %d\n", epoll_wait(set, events, 2, 10000), errno);
    pthread_t thread;
    pthread_create(&thread, NULL, writes, &ends[1]);
    printf("written: %d", poll(asked, 2, 10000));
    pthread_join(thread, NULL);
    int ready = epoll_wait(set, events, 2, 10000);
    printf(" %d %d %d %d\n", asked[0].revents, ready, events[0].events == EPOLLIN, (int)events[0].data.u64);
}

static void left_as_it_was(void) {
    struct timespec time = span(MS);
    nanosleep(&time, NULL);
    sigset_t mask;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    int blocked = 0;
    for (int signal = 1; signal < 65; signal++)
        blocked += sigismember(&mask, signal) == 1;
    printf("afterwards: blocked %d\n", blocked);
    /* What it makes is as it would be. */
    int status;
    pid_t child = fork();
    if (child == 0)
        _exit(sched_getscheduler(0));
    waitpid(child, &status, 0);
    printf("a child: %d\n", status);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    never_too_short();
    bad_arguments();
    interrupted(0, "interrupted");
    interrupted(SA_RESTART, "interrupted, restarting");
    slow_handler();
    ignored();
    stopped();
    escaped();
    cancelled();
    bombarded();
    timeouts();
    left_as_it_was();
    return 0;
}
