// What handlers see of the call that they interrupt, and what unwinds from there: must be the same with an executive.
// Compiled with several C libraries; musl has no <execinfo.h>, and cancels threads by the address that was interrupted.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>
#ifdef __GLIBC__
#include <execinfo.h>
#endif

// So often is each call made before the one that blocks: from then on its place is rewritten.
enum { HOT = 60 };

static int fds[2], sockets[2];
static volatile pid_t child;
static volatile int turn;

void calls_read(void) {
    char byte;
    for (int i = 0; i < HOT; i++) {
        (void)!write(fds[1], "x", 1);
        (void)!read(fds[0], &byte, 1);
    }
    turn = 1;
    ssize_t got = read(fds[0], &byte, 1);
    printf("read %zd %d\n", got, got < 0 ? errno : 0);
}

void calls_nanosleep(void) {
    struct timespec time = {0, 1}, left = {0};
    for (int i = 0; i < HOT; i++)
        nanosleep(&time, NULL);
    turn = 1;
    time.tv_sec = 20;
    int got = nanosleep(&time, &left);
    printf("nanosleep %d %d, left %d\n", got, errno, left.tv_sec > 0);
}

void calls_accept(void) {
    for (int i = 0; i < HOT; i++)
        accept(-1, NULL, NULL);
    turn = 1;
    int got = accept(sockets[0], NULL, NULL);
    printf("accept %d %d\n", got, errno);
}

void calls_poll(void) {
    struct pollfd ready = {.fd = fds[0], .events = POLLIN};
    for (int i = 0; i < HOT; i++)
        poll(&ready, 1, 0);
    turn = 1;
    int got = poll(&ready, 1, 20000);
    printf("poll %d %d\n", got, errno);
}

void calls_ppoll(void) {
    struct pollfd ready = {.fd = fds[0], .events = POLLIN};
    struct timespec none = {0, 0}, long_time = {20, 0};
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, NULL, &mask);
    for (int i = 0; i < HOT; i++)
        ppoll(&ready, 1, &none, &mask);
    turn = 1;
    int got = ppoll(&ready, 1, &long_time, &mask);
    printf("ppoll %d %d\n", got, errno);
}

void calls_wait(void) {
    for (int i = 0; i < HOT; i++)
        waitpid(-1, NULL, WNOHANG);
    child = fork();
    if (child == 0) {
        // Nobody is to wait for what it will never say.
        close(STDOUT_FILENO);
        close(STDERR_FILENO);
        for (;;)
            pause();
    }
    turn = 1;
    // What a child of before has left there depends on when it ended.
    errno = 0;
    int got = waitpid(child, NULL, 0);
    printf("waitpid %d %d\n", got, errno);
}

static void end_child(void) {
    if (child > 0)
        kill(child, SIGKILL);
    child = 0;
}

void calls_sem(void) {
    sem_t semaphore;
    sem_init(&semaphore, 0, 0);
    turn = 1;
    int got = sem_wait(&semaphore);
    printf("sem_wait %d %d\n", got, errno);
}

void calls_pause(void) {
    turn = 1;
    int got = pause();
    printf("pause %d %d\n", got, errno);
}

static const struct {
    const char *name;
    void (*make)(void);
} CALLS[] = {
    {"read", calls_read},   {"nanosleep", calls_nanosleep}, {"accept", calls_accept}, {"poll", calls_poll},
    {"ppoll", calls_ppoll}, {"pause", calls_pause},         {"wait", calls_wait},     {"sem", calls_sem},
};
enum { COUNT = sizeof CALLS / sizeof *CALLS };

static void cleanup(void *text) { printf("cleaned up %s\n", (char *)text); }

static void *cancelled(void *argument) {
    long which = (long)argument;
    pthread_cleanup_push(cleanup, (void *)CALLS[which].name);
    CALLS[which].make();
    pthread_cleanup_pop(0);
    return NULL;
}

// Whether a thread of this process sleeps in a call.
static int sleeps(pid_t thread) {
    char path[64], text[512] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    char *state = length > 0 ? strrchr(text, ')') : NULL;
    return state && state[2] == 'S';
}

static pid_t other;

static void *told(void *argument) {
    other = syscall(SYS_gettid);
    return cancelled(argument);
}

// Waits until the other thread blocks, in the call and not on its way there; or has returned.
static void await(void) {
    for (int calm = 0; calm < 5 && turn < 2;) {
        usleep(2000);
        calm = turn && other && sleeps(other) ? calm + 1 : 0;
    }
}

static void cancel(void) {
    for (long which = 0; which < COUNT; which++) {
        turn = other = 0;
        pthread_t thread;
        void *result;
        pthread_create(&thread, NULL, told, (void *)which);
        await();
        pthread_cancel(thread);
        pthread_join(thread, &result);
        end_child();
        printf("%s: cancelled %d\n", CALLS[which].name, result == PTHREAD_CANCELED);
    }
}

static void *asynchronous(void *argument) {
    (void)argument;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    other = syscall(SYS_gettid);
    turn = 1;
    for (;;)
        getppid();
    return NULL;
}

static void *deferred(void *argument) {
    int *ends = argument;
    char byte = 0;
    turn = 1;
    // A cancellation point each, most of them done at once.
    for (;;) {
        (void)!write(ends[1], &byte, 1);
        (void)!read(ends[0], &byte, 1);
    }
    return NULL;
}

// Threads that are cancelled anywhere: in a call, before it, behind it.
static void cancel_often(void) {
    for (int i = 0; i < 100; i++) {
        int ends[2];
        pthread_t thread;
        void *result;
        turn = 0;
        (void)!pipe(ends);
        pthread_create(&thread, NULL, i % 2 ? asynchronous : deferred, ends);
        while (!turn)
            sched_yield();
        for (volatile int wait = 0; wait < i * 37 % 5000; wait++)
            ;
        pthread_cancel(thread);
        pthread_join(thread, &result);
        if (result != PTHREAD_CANCELED)
            printf("not cancelled\n");
        close(ends[0]);
        close(ends[1]);
    }
    printf("all cancelled\n");
}

static int forced;

static void look(int number, siginfo_t *info, void *argument) {
    (void)info;
    ucontext_t *context = argument;
    greg_t *registers = context->uc_mcontext.gregs;
    const unsigned char *rip = (const unsigned char *)registers[REG_RIP];
    int behind = rip[-2] == 0x0f && rip[-1] == 0x05, before = rip[0] == 0x0f && rip[1] == 0x05;
    long distance = (char *)&number - (char *)registers[REG_RSP];
    printf("signal %d: %s, rax %lld, rcx %d, stack %d, mask %d\n", number,
           behind   ? "behind a call"
           : before ? "before a call"
                    : "elsewhere",
           registers[REG_RAX], behind ? registers[REG_RCX] == registers[REG_RIP] : 2,
           distance < 0 && distance > -65536, sigismember(&context->uc_sigmask, SIGUSR2));
    if (forced) {
        // The call is to return this.
        registers[REG_RAX] = forced;
        registers[REG_RIP] += before ? 2 : 0;
    }
}

static void install(int flags) {
    struct sigaction action = {.sa_sigaction = look, .sa_flags = SA_SIGINFO | flags}, old;
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR1, NULL, &old);
    printf("installed %d %x\n", old.sa_sigaction == look, old.sa_flags & (SA_SIGINFO | SA_RESTART));
}

static void *blocked(void *argument) {
    other = syscall(SYS_gettid);
    CALLS[(long)argument].make();
    turn = 2;
    return NULL;
}

// A handler looks at what it interrupts, and has it return something else.
static void context(void) {
    for (int way = 0; way < 4; way++) {
        forced = way & 1 ? 17 : 0;
        install(way & 2 ? SA_RESTART : 0);
        for (long which = 0; which < COUNT; which++) {
            // glibc ends a program whose futex returns what it cannot.
            if (forced && !strcmp(CALLS[which].name, "sem"))
                continue;
            turn = other = 0;
            pthread_t thread;
            void *result;
            printf("%s, ", CALLS[which].name);
            pthread_create(&thread, NULL, blocked, (void *)which);
            await();
            pthread_kill(thread, SIGUSR1);
            // What was restarted goes on until cancelled.
            if (!forced && way & 2) {
                await();
                pthread_cancel(thread);
            }
            pthread_join(thread, &result);
            end_child();
        }
    }
}

#ifdef __GLIBC__
static void frames(int number) {
    void *found[32];
    (void)number;
    int count = backtrace(found, 32);
    for (int i = 0; i < count; i++) {
        Dl_info about;
        if (dladdr(found[i], &about) && about.dli_sname && strncmp(about.dli_sname, "calls_", 6) == 0)
            printf("in %s\n", about.dli_sname);
        if (dladdr(found[i], &about) && about.dli_sname && strcmp(about.dli_sname, "trace") == 0)
            printf("in trace\n");
    }
}

static void *poke(void *argument) {
    await();
    pthread_kill(*(pthread_t *)argument, SIGUSR1);
    return NULL;
}

// A handler finds the frames of what it interrupts.
__attribute__((noinline)) void trace(void) {
    pthread_t self = pthread_self(), thread;
    void *warm[1];
    backtrace(warm, 1);
    struct sigaction action = {.sa_handler = frames};
    sigaction(SIGUSR1, &action, NULL);
    other = getpid();
    for (int which = 0; which < COUNT; which++) {
        if (!strcmp(CALLS[which].name, "wait"))
            continue;
        turn = 0;
        pthread_create(&thread, NULL, poke, &self);
        CALLS[which].make();
        pthread_join(thread, NULL);
    }
}
#else
void trace(void) {}
#endif

// Stops this process for a moment, soon.
static pid_t stop_soon(void) {
    pid_t pid = fork();
    if (pid == 0) {
        usleep(60000);
        kill(getppid(), SIGSTOP);
        usleep(60000);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    return pid;
}

// Calls that a stop interrupts, and that the kernel goes on with by restart_syscall: from a place that is dispatched, and from
// one that is rewritten.
static void stopped(void) {
    for (int hot = 0; hot < 2; hot++) {
        struct timespec none = {0, 0}, moment = {0, 300000000}, begun, ended;
        struct pollfd ready = {.fd = fds[0], .events = POLLIN};
        for (int i = 0; i < hot * HOT; i++)
            nanosleep(&none, NULL), poll(&ready, 1, 0);
        for (int which = 0; which < 2; which++) {
            pid_t pid = stop_soon();
            clock_gettime(CLOCK_MONOTONIC, &begun);
            int got = which ? poll(&ready, 1, 300) : nanosleep(&moment, NULL);
            clock_gettime(CLOCK_MONOTONIC, &ended);
            long taken = (ended.tv_sec - begun.tv_sec) * 1000 + (ended.tv_nsec - begun.tv_nsec) / 1000000;
            printf("%s gave %d, after all of the time %d\n", which ? "poll" : "nanosleep", got, taken >= 299);
            waitpid(pid, NULL, 0);
        }
    }
}

static volatile int ticks;
static void tick(int number) {
    (void)number;
    ticks++;
}

// Handlers that come at any point, and are left again.
static void anywhere(void) {
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    sigaction(SIGPROF, &action, NULL);
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGPROF};
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    struct itimerspec often = {{0, 50000}, {0, 50000}}, never = {0};
    timer_settime(timer, 0, &often, NULL);
    long wrong = 0;
    char bytes[8];
    for (int i = 0; i < 100000; i++) {
        wrong += write(fds[1], "abc", 3) != 3;
        wrong += read(fds[0], bytes, 8) != 3 || memcmp(bytes, "abc", 3);
        wrong += getppid() <= 0;
        sigset_t set;
        sigemptyset(&set);
        wrong += sigprocmask(SIG_BLOCK, &set, NULL) != 0;
    }
    timer_settime(timer, 0, &never, NULL);
    printf("ticked %d, wrong %ld\n", ticks > 0, wrong);
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IONBF, 0);
    alarm(100);
    (void)!pipe(fds);
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    sockets[0] = socket(AF_UNIX, SOCK_STREAM, 0);
    bind(sockets[0], (struct sockaddr *)&address, sizeof(sa_family_t));
    listen(sockets[0], 1);
    if (!strcmp(what, "cancel"))
        cancel();
    else if (!strcmp(what, "cancel-often"))
        cancel_often();
    else if (!strcmp(what, "context"))
        context();
    else if (!strcmp(what, "trace"))
        trace();
    else if (!strcmp(what, "stopped"))
        stopped();
    else if (!strcmp(what, "anywhere"))
        anywhere();
    else
        return 2;
    return 0;
}
