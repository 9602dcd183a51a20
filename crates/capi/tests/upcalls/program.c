/* Registers a function for upcalls, and does what its first argument names. The test sends upcalls after "ready". */
#include <errno.h>
#include <orrery/hijack.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <linux/filter.h>
#include <linux/seccomp.h>

#include "../check_program.h"

#define LAST 64
#define SCENARIO(name) if (strcmp(argv[1], name) == 0)

extern char **environ;

static volatile int64_t calls, last_number, last_value, wrong;
static volatile pid_t in_thread;
static char *volatile stack_in_call;
static int place;

static void on_upcall(int64_t number, int64_t value, void *user) {
    char here;
    wrong += user != &place || number != value + 1000;
    in_thread = (pid_t)syscall(SYS_gettid);
    stack_in_call = &here;
    last_number = number;
    last_value = value;
    errno = 77;
    calls++;
}

static void ready(void) { CHECK(write(1, "ready\n", 6) == 6); }

/* Registers, and notifies the test. */
static void begin(orrery_upcall_function function) {
    CHECK(orrery_upcall_register(NULL, function, &place) == 0);
    ready();
}

/* Sleeps a little, also when a signal interrupts. */
static void nap(void) {
    struct timespec time = {0, 1000 * 1000};
    nanosleep(&time, NULL);
}

static void wait_for(int64_t many) {
    while (calls < many)
        nap();
}

static void basic(void) {
    char here;
    begin(on_upcall);
    errno = 5;
    while (calls < 20)
        CHECK(errno == 5);
    CHECK(wrong == 0 && last_number == 1019 && last_value == 19);
    CHECK(in_thread == getpid());
    ptrdiff_t distance = stack_in_call - &here;
    CHECK(distance > 1 << 20 || distance < -(1 << 20));
    CHECK(orrery_upcall_dropped() == 0);
    FAILS(orrery_upcall_register(NULL, on_upcall, &place), EBUSY);
    CHECK(orrery_upcall_unregister() == 0);
    FAILS(orrery_upcall_unregister(), ENOENT);
    struct orrery_upcall_options options = ORRERY_UPCALL_OPTIONS_INIT;
    options.stack_size = 1;
    FAILS(orrery_upcall_register(&options, on_upcall, &place), EINVAL);
    FAILS(orrery_upcall_register(NULL, NULL, &place), EINVAL);
    /* Again, with other settings. */
    options.stack_size = 1 << 20;
    CHECK(orrery_upcall_register(&options, on_upcall, &place) == 0);
    ready();
    wait_for(40);
    CHECK(wrong == 0 && orrery_upcall_unregister() == 0);
}

static void *blocks(void *nothing) {
    sigset_t all;
    (void)nothing;
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_SETMASK, &all, NULL) == 0);
    for (;;)
        pause();
    return NULL;
}

static void hidden(void) {
    sigset_t set, old;
    struct sigaction action;
    struct timespec soon = {0, 50 * 1000 * 1000};
    char bytes[1024];
    pthread_t other;
    sigemptyset(&set);
    sigaddset(&set, LAST);
    /* Before, it is a signal like others. */
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0 && sigprocmask(SIG_SETMASK, NULL, &old) == 0);
    CHECK(sigismember(&old, LAST) == 1);
    CHECK(sigaction(LAST, NULL, &action) == 0);
    CHECK(pthread_create(&other, NULL, blocks, NULL) == 0);
    CHECK(orrery_upcall_register(NULL, on_upcall, &place) == 0);
    CHECK(sigprocmask(SIG_BLOCK, &set, NULL) == 0 && sigprocmask(SIG_SETMASK, NULL, &old) == 0);
    CHECK(sigismember(&old, LAST) == 0);
    CHECK(sigprocmask(SIG_SETMASK, &set, NULL) == 0 && sigprocmask(SIG_SETMASK, NULL, &old) == 0);
    CHECK(sigismember(&old, LAST) == 0);
    memset(&action, 0, sizeof action);
    action.sa_handler = SIG_IGN;
    errno = 0;
    CHECK(sigaction(LAST, &action, NULL) == -1 && errno == EINVAL);
    CHECK(sigaction(LAST, NULL, &action) == -1 && errno == EINVAL);
    int fd = signalfd(-1, &set, SFD_NONBLOCK);
    CHECK(fd >= 0);
    sigfillset(&old);
    sigdelset(&old, SIGUSR1);
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    ready();
    /* Neither waiting for it, nor a set of nearly all signals, keeps upcalls away. */
    while (calls < 5) {
        int found = sigtimedwait(&set, NULL, &soon);
        CHECK(found == -1 && (errno == EAGAIN || errno == EINTR));
        CHECK(read(fd, bytes, sizeof bytes) == -1 && errno == EAGAIN);
    }
    CHECK(wrong == 0);
    /* A set of all does, until another one is in force. */
    sigfillset(&old);
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    int64_t before = calls;
    CHECK(write(1, "blocked\n", 8) == 8);
    char byte;
    CHECK(read(0, &byte, 1) == 1);
    CHECK(calls == before);
    CHECK(sigpending(&old) == 0 && sigismember(&old, LAST) == 0);
    sigemptyset(&old);
    CHECK(sigprocmask(SIG_SETMASK, &old, NULL) == 0);
    wait_for(before + 5);
    CHECK(wrong == 0);
}

/* Calls with SA_RESTART semantics go on, the others of signal(7) fail with EINTR. */
static void interrupted(void) {
    char byte = 0;
    begin(on_upcall);
    CHECK(read(0, &byte, 1) == 1 && byte == 'x');
    /* On a busy machine the last ones come later than the byte. */
    wait_for(5);
    CHECK(calls == 5 && wrong == 0);
    struct pollfd nothing = {0, POLLIN, 0};
    CHECK(write(1, "polls\n", 6) == 6);
    CHECK(poll(&nothing, 1, 60 * 1000) == -1 && errno == EINTR);
    CHECK(calls > 5);
}

static sigjmp_buf back;

static void leaves(int64_t number, int64_t value, void *user) {
    on_upcall(number, value, user);
    siglongjmp(back, 1);
}

static char alternate[128 << 10];
static volatile int on_alternate, second;

static void handles_second(int signal) {
    char here[2000];
    memset(here, 0x5a, sizeof here);
    __asm__ volatile("" ::"r"(here) : "memory");
    CHECK(write(-1, here, 1) == -1);
    second = signal;
}

/* On the alternate stack, until an upcall has come. */
static void handles(int signal) {
    volatile char here[512];
    memset((void *)here, 0xa5, sizeof here);
    on_alternate = 1;
    int64_t before = calls;
    (void)signal;
    CHECK(write(1, "ready\n", 6) == 6);
    while (calls == before)
        CHECK(write(-1, "", 1) == -1);
    for (size_t index = 0; index < sizeof here; index++)
        CHECK(here[index] == (char)0xa5);
    on_alternate = 0;
}

static void calls_and_raises(int64_t number, int64_t value, void *user) {
    on_upcall(number, value, user);
    raise(SIGUSR2);
    for (int i = 0; i < 40; i++)
        CHECK(write(-1, "", 1) == -1 && errno == EBADF);
}

static void use_alternate_stack(void) {
    stack_t stack;
    struct sigaction action;
    memset(&stack, 0, sizeof stack);
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    CHECK(sigaltstack(&stack, NULL) == 0);
    memset(&action, 0, sizeof action);
    action.sa_flags = SA_ONSTACK;
    action.sa_handler = handles;
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    action.sa_handler = handles_second;
    CHECK(sigaction(SIGUSR2, &action, NULL) == 0);
}

static void alternate_stack(void) {
    stack_t now;
    use_alternate_stack();
    CHECK(orrery_upcall_register(NULL, calls_and_raises, &place) == 0);
    for (int round = 0; round < 5; round++) {
        second = 0;
        raise(SIGUSR1);
        CHECK(second == SIGUSR2 && wrong == 0);
    }
    CHECK(sigaltstack(NULL, &now) == 0);
    CHECK(now.ss_sp == alternate && now.ss_size == sizeof alternate && now.ss_flags == 0);
}

static void leave_for_good(void) {
    stack_t now;
    CHECK(orrery_upcall_register(NULL, leaves, &place) == 0);
    if (sigsetjmp(back, 1) == 0)
        ready();
    wait_for(20);
    CHECK(calls == 20 && wrong == 0);
    CHECK(orrery_upcall_unregister() == 0);
    /* From calls, which are dispatched on the alternate stack now. */
    use_alternate_stack();
    calls = 0;
    CHECK(orrery_upcall_register(NULL, leaves, &place) == 0);
    if (sigsetjmp(back, 1) == 0)
        ready();
    wait_for(20);
    /* There is an alternate stack all the time. */
    second = 0;
    raise(SIGUSR2);
    CHECK(second == SIGUSR2 && calls == 20 && wrong == 0);
    CHECK(sigaltstack(NULL, &now) == 0 && now.ss_flags == 0 && now.ss_size >= 16384);
    CHECK(orrery_upcall_unregister() == 0);
    raise(SIGUSR2);
}

static void ends_itself(int64_t number, int64_t value, void *user) {
    on_upcall(number, value, user);
    CHECK(orrery_upcall_unregister() == 0);
    /* Its stack is still there. */
    volatile char more[8000];
    memset((void *)more, 1, sizeof more);
}

static void unregister_within(void) {
    for (int round = 1; round <= 5; round++) {
        begin(ends_itself);
        wait_for(round);
        FAILS(orrery_upcall_unregister(), ENOENT);
    }
    CHECK(calls == 5);
}

static void children(void) {
    begin(on_upcall);
    while (calls < 50) {
        int status;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            FAILS(orrery_upcall_unregister(), ENOENT);
            FAILS(orrery_upcall_register(NULL, on_upcall, &place), EACCES);
            int64_t before = calls;
            raise(LAST);
            CHECK(calls == before && orrery_upcall_dropped() == 0);
            _exit(3);
        }
        while (waitpid(child, &status, 0) == -1)
            CHECK(errno == EINTR);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
        char *arguments[] = {(char *)"true", NULL};
        CHECK(posix_spawnp(&child, "true", NULL, NULL, arguments, environ) == 0);
        while (waitpid(child, &status, 0) == -1)
            CHECK(errno == EINTR);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(wrong == 0);
}

static pthread_barrier_t barrier;

static void *registers(void *done) {
    CHECK(orrery_upcall_register(NULL, on_upcall, &place) == 0);
    pthread_barrier_wait(&barrier);
    while (!*(volatile int *)done)
        nap();
    return (void *)(intptr_t)syscall(SYS_gettid);
}

static void threads(void) {
    pthread_t thread;
    int done = 0;
    void *number;
    pthread_barrier_init(&barrier, NULL, 2);
    CHECK(pthread_create(&thread, NULL, registers, &done) == 0);
    pthread_barrier_wait(&barrier);
    FAILS(orrery_upcall_unregister(), EPERM);
    FAILS(orrery_upcall_register(NULL, on_upcall, &place), EBUSY);
    ready();
    wait_for(10);
    done = 1;
    CHECK(pthread_join(thread, &number) == 0);
    CHECK(in_thread == (pid_t)(intptr_t)number && in_thread != getpid());
    CHECK(write(1, "ended\n", 6) == 6);
    char byte;
    while (read(0, &byte, 1) == -1)
        CHECK(errno == EINTR);
    int64_t before = calls;
    begin(on_upcall);
    wait_for(before + 10);
    CHECK(in_thread == getpid() && wrong == 0);
}

/* Executes itself again and again while upcalls come. */
static void executes(char **argv) {
    int left = atoi(argv[2]);
    char number[20];
    struct sigaction action;
    if (left == 0)
        return;
    CHECK(sigaction(LAST, NULL, &action) == 0 && action.sa_handler == SIG_DFL);
    CHECK(orrery_upcall_register(NULL, on_upcall, &place) == 0);
    if (left % 10 == 0)
        ready();
    wait_for(2);
    execl("/dev/null", "null", (char *)NULL);
    CHECK(errno == EACCES);
    int64_t before = calls;
    wait_for(before + 2);
    CHECK(wrong == 0);
    sprintf(number, "%d", left - 1);
    execl(argv[0], argv[0], argv[1], number, (char *)NULL);
    CHECK(0);
}

static void crashes(int64_t number, int64_t value, void *user) {
    on_upcall(number, value, user);
    *(volatile char *)8 = 1;
}

static void on_fault(int signal) {
    (void)signal;
    _exit(calls == 1 ? 9 : 8);
}

static volatile int levels = 1000 * 1000;

static void deep(int64_t number, int64_t value, void *user) {
    volatile char large[4096];
    large[0] = (char)number;
    if (levels-- > 0)
        deep(number + large[0], value, user);
    large[1] = 0;
}

static void computes(void) {
    begin(on_upcall);
    char byte;
    volatile uint64_t sum = 0;
    struct pollfd input = {0, POLLIN, 0};
    for (;;) {
        for (int i = 0; i < 100000; i++)
            sum += (uint64_t)i * sum;
        if (poll(&input, 1, 0) == 1)
            break;
    }
    CHECK(read(0, &byte, 1) == 1);
    /* On a busy machine the last ones of three come later than the byte. */
    for (int i = 0; i < 10000 && calls < 3; i++)
        nap();
    printf("%lld %llu\n", (long long)calls, (unsigned long long)orrery_upcall_dropped());
    CHECK(fflush(stdout) == 0);
}

static void slow(int64_t number, int64_t value, void *user) {
    on_upcall(number, value, user);
    struct timespec time = {0, 20 * 1000 * 1000};
    nanosleep(&time, NULL);
}

static void filters(void) {
    struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {1, &allow};
    begin(on_upcall);
    wait_for(5);
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    int64_t before = calls;
    CHECK(write(1, "filtered\n", 9) == 9);
    char byte;
    CHECK(read(0, &byte, 1) == 1);
    CHECK(calls == before);
    FAILS(orrery_upcall_register(NULL, on_upcall, &place), EPERM);
}

static void managers(void) {
    char byte;
    begin(on_upcall);
    wait_for(5);
    CHECK(write(1, "five\n", 5) == 5);
    while (read(0, &byte, 1) == -1)
        CHECK(errno == EINTR);
    /* Another manager listens now. */
    CHECK(orrery_upcall_unregister() == 0);
    while (orrery_upcall_register(NULL, on_upcall, &place) != 0) {
        CHECK(errno == EACCES || errno == ECONNREFUSED || errno == ENOENT);
        nap();
    }
    int64_t before = calls;
    ready();
    wait_for(before + 5);
    CHECK(wrong == 0);
}

int main(int argc, char **argv) {
    CHECK(argc >= 2);
    SCENARIO("basic") basic();
    SCENARIO("hidden") hidden();
    SCENARIO("interrupted") interrupted();
    SCENARIO("leave") leave_for_good();
    SCENARIO("alternate") alternate_stack();
    SCENARIO("within") unregister_within();
    SCENARIO("children") children();
    SCENARIO("threads") threads();
    SCENARIO("executes") executes(argv);
    SCENARIO("computes") computes();
    SCENARIO("filters") filters();
    SCENARIO("managers") managers();
    SCENARIO("slow") {
        begin(slow);
        char byte;
        while (read(0, &byte, 1) == -1)
            CHECK(errno == EINTR);
        CHECK(wrong == 0);
        printf("%lld %llu\n", (long long)calls, (unsigned long long)orrery_upcall_dropped());
        CHECK(fflush(stdout) == 0);
    }
    SCENARIO("crashes") {
        begin(crashes);
        for (;;)
            pause();
    }
    SCENARIO("faults") {
        CHECK(signal(SIGSEGV, on_fault) != SIG_ERR);
        begin(crashes);
        for (;;)
            pause();
    }
    SCENARIO("deep") {
        begin(deep);
        for (;;)
            pause();
    }
    SCENARIO("refused") {
        int result = orrery_upcall_register(NULL, on_upcall, &place);
        CHECK(result == -1);
        printf("%d %s\n", errno, orrery_last_error());
        return 0;
    }
    CHECK(write(1, "done\n", 5) == 5);
    return 0;
}
