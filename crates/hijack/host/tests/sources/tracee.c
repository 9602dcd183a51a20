// One behaviour per name: each prints what a program can see of it, and must print the same with an executive.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xmmintrin.h>

extern char **environ;
static volatile sig_atomic_t hits;
static sigjmp_buf back;

static void count(int signal) {
    (void)signal;
    hits++;
    getppid();
}

static void install(int signal, void (*handler)(int), int flags) {
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags};
    sigfillset(&action.sa_mask);
    sigaction(signal, &action, NULL);
}

// Waits until the main thread has slept in a call for a while, however busy the machine is.
static void await_sleep(void) {
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
    for (int calm = 0; calm < 10;) {
        usleep(2000);
        int file = open(path, O_RDONLY);
        ssize_t length = read(file, text, sizeof text - 1);
        close(file);
        text[length < 0 ? 0 : length] = 0;
        char *state = strrchr(text, ')');
        calm = state && state[2] == 'S' ? calm + 1 : 0;
    }
}

static void *poke(void *pipe) {
    await_sleep();
    kill(getpid(), SIGUSR1);
    await_sleep();
    write(((int *)pipe)[1], "x", 1);
    return NULL;
}

// A read that is interrupted: once restarted, once not.
static void restart(void) {
    for (int flags = 0; flags <= SA_RESTART; flags += SA_RESTART) {
        int fds[2];
        char byte;
        pipe(fds);
        install(SIGUSR1, count, flags);
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, NULL);
        pthread_t thread;
        hits = 0;
        pthread_create(&thread, NULL, poke, fds);
        pthread_sigmask(SIG_UNBLOCK, &set, NULL);
        ssize_t got = read(fds[0], &byte, 1);
        printf("%zd %s %d\n", got, got < 0 ? strerror(errno) : "", hits);
        pthread_join(thread, NULL);
    }
}

static void leave(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

// Handlers that leave by siglongjmp, from blocking calls.
static void longjump(void) {
    install(SIGALRM, leave, 0);
    for (int i = 0; i < 50; i++) {
        if (!sigsetjmp(back, 1)) {
            struct itimerval soon = {.it_value = {0, 1000}};
            setitimer(ITIMER_REAL, &soon, NULL);
            for (;;)
                pause();
        }
    }
    sigset_t set;
    sigprocmask(SIG_BLOCK, NULL, &set);
    printf("left, SIGALRM %sblocked\n", sigismember(&set, SIGALRM) ? "" : "not ");
}

static void where(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info, (void)context;
    stack_t stack;
    char here;
    int changed = sigaltstack(&(stack_t){.ss_flags = SS_DISABLE}, NULL);
    int error = errno;
    sigaltstack(NULL, &stack);
    printf("flags %d, on it %d, disable %d %s\n", stack.ss_flags,
           &here >= (char *)stack.ss_sp && &here < (char *)stack.ss_sp + stack.ss_size, changed,
           strerror(error));
}

static void alternate(size_t size) {
    stack_t stack = {.ss_sp = malloc(size), .ss_size = size}, old;
    printf("%d\n", sigaltstack(&stack, NULL));
    struct sigaction action = {.sa_sigaction = where, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigaction(SIGUSR1, &action, NULL);
    raise(SIGUSR1);
    raise(SIGUSR1);
    sigaltstack(NULL, &old);
    printf("%d %d\n", old.ss_sp == stack.ss_sp, old.ss_flags);
    stack.ss_size = 100;
    printf("%d %s\n", sigaltstack(&stack, NULL), strerror(errno));
    stack = (stack_t){.ss_flags = SS_DISABLE};
    printf("%d\n", sigaltstack(&stack, &old));
    sigaltstack(NULL, &old);
    printf("%d\n", old.ss_flags);
    printf("%d %s\n", sigaltstack((void *)8, NULL), strerror(errno));
}

// Masks: everything blocked, including the signal that executives live by.
static void masks(void) {
    sigset_t all, old;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    printf("usr1 before %d\n", sigismember(&old, SIGUSR1));
    install(SIGUSR1, count, 0);
    raise(SIGUSR1);
    printf("blocked: %d\n", hits);
    struct timespec none = {0};
    sigset_t some = all;
    sigdelset(&some, SIGUSR1);
    printf("ppoll %d", ppoll(NULL, 0, &none, &all));
    printf(", %d %s, %d hits\n", ppoll(NULL, 0, NULL, &some), strerror(errno), hits);
    raise(SIGUSR1);
    printf("suspend %d %s, %d hits\n", sigsuspend(&some), strerror(errno), hits);
    raise(SIGUSR1);
    printf("pselect %d %s, %d hits\n", pselect(0, NULL, NULL, NULL, NULL, &some), strerror(errno), hits);
    raise(SIGUSR1);
    sigprocmask(SIG_SETMASK, &old, NULL);
    printf("unblocked: %d\n", hits);
    printf("%d %s\n", sigprocmask(77, &all, NULL), strerror(errno));
    printf("%ld %s\n", syscall(SYS_rt_sigprocmask, SIG_BLOCK, &all, NULL, 4), strerror(errno));
    printf("%ld %s\n", syscall(SYS_rt_sigprocmask, SIG_BLOCK, 8, NULL, 8), strerror(errno));
    printf("%ld %s\n", syscall(SYS_rt_sigprocmask, SIG_BLOCK, NULL, 8, 8), strerror(errno));
    printf("%ld %s\n", syscall(SYS_rt_sigaction, SIGUSR1, 8, NULL, 8), strerror(errno));
}

// The program's own SIGSYS.
static void sigsys(void) {
    struct sigaction action = {0}, old;
    sigaction(SIGSYS, NULL, &old);
    printf("default %d\n", old.sa_handler == SIG_DFL);
    install(SIGSYS, count, 0);
    sigaction(SIGSYS, NULL, &old);
    printf("ours %d\n", old.sa_handler == count);
    kill(getpid(), SIGSYS);
    printf("hits %d\n", hits);
    action.sa_handler = SIG_IGN;
    sigaction(SIGSYS, &action, NULL);
    kill(getpid(), SIGSYS);
    printf("ignored: %d\n", hits);
    action.sa_handler = SIG_DFL;
    sigaction(SIGSYS, &action, NULL);
    fflush(stdout);
    kill(getpid(), SIGSYS);
    printf("alive\n");
}

static volatile sig_atomic_t sender;

static void note(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    hits++;
    sender = info->si_pid;
}

// Another process sends SIGSYS to this one; gives that process's number.
static pid_t send_sigsys(void) {
    pid_t child = fork();
    if (!child) {
        kill(getppid(), SIGSYS);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return child;
}

static int is_blocked(void) {
    sigset_t now;
    sigprocmask(SIG_BLOCK, NULL, &now);
    return sigismember(&now, SIGSYS);
}

static int is_pending(void) {
    sigset_t now;
    sigpending(&now);
    return sigismember(&now, SIGSYS);
}

// Handlers of SIGUSR1 and SIGUSR2 that find SIGSYS blocked, or leave it blocked.
static void look(int signal) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGSYS);
    printf("handler %d finds it %d\n", signal == SIGUSR1, is_blocked());
    sigprocmask(signal == SIGUSR1 ? SIG_UNBLOCK : SIG_BLOCK, &set, NULL);
    if (signal != SIGUSR1)
        send_sigsys();
    printf("and leaves it %d, %d hits\n", is_blocked(), hits);
}

static void *send_to_thread(void *thread) {
    await_sleep();
    pthread_kill(*(pthread_t *)thread, SIGSYS);
    await_sleep();
    pthread_kill(*(pthread_t *)thread, SIGUSR1);
    return NULL;
}

// A SIGSYS that somebody sends while it is blocked waits until it is not.
static void sigsys_blocked(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    sigset_t only, old, none;
    sigemptyset(&none);
    sigemptyset(&only);
    sigaddset(&only, SIGSYS);
    struct sigaction action = {.sa_sigaction = note, .sa_flags = SA_SIGINFO};
    sigaction(SIGSYS, &action, NULL);
    int sent = 0;
    // So often that the place is rewritten.
    for (int i = 0; i < 40; i++) {
        sigprocmask(SIG_BLOCK, &only, &old);
        if (i % 13 == 0) {
            pid_t from = send_sigsys();
            send_sigsys();
            sent++;
            printf("%d: blocked %d before %d pending %d, %d hits", i, is_blocked(), sigismember(&old, SIGSYS),
                   is_pending(), hits);
            sigprocmask(i % 2 ? SIG_UNBLOCK : SIG_SETMASK, i % 2 ? &only : &none, NULL);
            printf("; then blocked %d pending %d, %d of %d, by it %d\n", is_blocked(), is_pending(), hits,
                   sent, sender == from);
        }
        sigprocmask(SIG_SETMASK, &none, NULL);
    }
    sigprocmask(SIG_BLOCK, &only, NULL);
    struct timespec nothing = {0};
    for (int i = 0; i < 20; i++) {
        send_sigsys();
        printf("with it: %d", ppoll(NULL, 0, &nothing, &only));
        printf(", %d hits; suspend %d %s, %d hits, ", hits, sigsuspend(&none), strerror(errno), hits);
        send_sigsys();
        printf("ppoll %d %s, %d hits, ", ppoll(NULL, 0, NULL, &none), strerror(errno), hits);
        send_sigsys();
        printf("pselect %d %s, %d hits, ", pselect(0, NULL, NULL, NULL, NULL, &none), strerror(errno), hits);
        printf("blocked %d pending %d\n", is_blocked(), is_pending());
    }
    // Handlers of others.
    signal(SIGUSR1, look);
    signal(SIGUSR2, look);
    send_sigsys();
    raise(SIGUSR1);
    printf("afterwards %d, %d hits\n", is_blocked(), hits);
    sigprocmask(SIG_SETMASK, &none, NULL);
    raise(SIGUSR2);
    printf("afterwards %d, %d hits\n", is_blocked(), hits);
    // A sleep that such a signal does not end, and that another one does.
    sigprocmask(SIG_BLOCK, &only, NULL);
    int before = hits, pipes[2];
    char byte;
    pthread_t thread, self = pthread_self();
    install(SIGUSR1, count, 0);
    pipe(pipes);
    pthread_create(&thread, NULL, send_to_thread, &self);
    ssize_t got = read(pipes[0], &byte, 1);
    printf("read %zd %s after %d hits", got, strerror(errno), hits - before);
    pthread_join(thread, NULL);
    printf(", pending %d, %d hits\n", is_pending(), hits - before);
    // Processes begin with the mask, and without what was sent to their parent.
    fflush(stdout);
    if (!fork()) {
        printf("child: blocked %d pending %d\n", is_blocked(), is_pending());
        _exit(0);
    }
    wait(NULL);
    if (!vfork()) {
        execl("/proc/self/exe", "tracee", "sigsys-after", NULL);
        _exit(1);
    }
    wait(NULL);
    // What is ignored is not pending.
    signal(SIGSYS, SIG_IGN);
    printf("pending %d\n", is_pending());
    signal(SIGSYS, SIG_DFL);
    send_sigsys();
    printf("alive\n");
    sigprocmask(SIG_SETMASK, &none, NULL);
    printf("not alive\n");
}

static void *hammer(void *done) {
    for (int i = 0; i < 5000; i++) {
        getppid();
        if (i % 100 == 0)
            sched_yield();
    }
    __atomic_fetch_add((int *)done, 1, __ATOMIC_SEQ_CST);
    return NULL;
}

// Threads that call while signals arrive and the code beneath is rewritten.
static void storm(void) {
    install(SIGALRM, count, SA_RESTART);
    struct itimerval often = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &often, NULL);
    int done = 0;
    for (int round = 0; round < 5; round++) {
        pthread_t threads[8];
        for (int i = 0; i < 8; i++)
            pthread_create(&threads[i], NULL, hammer, &done);
        for (int i = 0; i < 8; i++)
            pthread_join(threads[i], NULL);
    }
    struct itimerval never = {0};
    setitimer(ITIMER_REAL, &never, NULL);
    printf("%d done, hit %d\n", done, hits > 0);
}

// Children: vfork's share memory, a failed exec is told, a thread may execute a program.
static void children(void) {
    volatile int shared = 0, turn;
    int status;
    for (turn = 0; turn < 100; turn++) {
        pid_t pid = vfork();
        if (pid == 0) {
            shared++;
            getppid();
            _exit(turn);
        }
        waitpid(pid, &status, 0);
        if (WEXITSTATUS(status) != turn)
            printf("wrong status %x\n", status);
    }
    printf("shared %d\n", shared);
    pid_t pid = vfork();
    if (pid == 0) {
        execl("/nonexistent", "x", NULL);
        shared = errno;
        execl("/etc/passwd", "x", NULL);
        shared += 1000 * errno;
        _exit(1);
    }
    waitpid(pid, &status, 0);
    printf("exec failed: %d, status %x\n", shared, status);
}

static void spawn(void) {
    pid_t pid;
    int status;
    char *nothing[] = {"x", NULL};
    printf("spawn: %d\n", posix_spawn(&pid, "/nonexistent", NULL, NULL, nothing, environ));
    char *echo[] = {"echo", "spawned", NULL};
    int result = posix_spawnp(&pid, "echo", NULL, NULL, echo, environ);
    waitpid(pid, &status, 0);
    printf("spawn: %d, status %x\n", result, status);
}

// Arguments of clone3 that contradict each other, and a stack that is too long.
static void half_stacks(void) {
    static char room[65536];
    struct {
        uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls;
    } arguments = {.exit_signal = SIGCHLD};
    for (int i = 0; i < 2; i++) {
        arguments.stack = i ? (uint64_t)room : 0;
        arguments.stack_size = i ? 0 : sizeof room;
        long result = syscall(SYS_clone3, &arguments, sizeof arguments);
        if (result == 0)
            _exit(0);
        printf("half a stack: %ld, %s\n", result, strerror(errno));
    }
}

static volatile int depth, deepest, failed_spawns;

// A child of a child ..., each of which uses the memory of the one before, which waits.
static __attribute__((noinline)) void nest(int wanted) {
    pid_t pid = vfork();
    if (pid == 0) {
        if (++depth < wanted)
            nest(wanted);
        if (depth > deepest)
            deepest = depth;
        _exit(0);
    }
    if (pid > 0)
        waitpid(pid, NULL, 0);
}

static void *spawn_again_and_again(void *argument) {
    (void)argument;
    for (int i = 0; i < 10; i++) {
        pid_t pid;
        char *nothing[] = {"true", NULL};
        if (posix_spawn(&pid, "/bin/true", NULL, NULL, nothing, environ) != 0)
            __sync_fetch_and_add(&failed_spawns, 1);
        else
            waitpid(pid, NULL, 0);
    }
    return NULL;
}

// Many threads wait for their children at a time, while others copy the process: a copy has none of those threads.
static void spawners(void) {
    nest(40);
    printf("spawners: %d deep\n", deepest);
    pthread_t threads[128];
    for (size_t i = 0; i < 128; i++)
        pthread_create(&threads[i], NULL, spawn_again_and_again, NULL);
    int bad = 0;
    for (int i = 0; i < 5; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0) {
            depth = deepest = 0;
            nest(40);
            _exit(deepest);
        }
        waitpid(pid, &status, 0);
        bad += status != 40 << 8;
    }
    for (size_t i = 0; i < 128; i++)
        pthread_join(threads[i], NULL);
    printf("spawners: %d of 1280 failed, and %d of 5 copies\n", failed_spawns, bad);
}

static void *become(void *argument) {
    (void)argument;
    execlp("echo", "echo", "from a thread", NULL);
    return NULL;
}

static void thread_exec(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, become, NULL);
    pthread_join(thread, NULL);
    printf("not reached\n");
}

static void *control(void *argument) {
    (void)argument;
    return (void *)(uintptr_t)(_mm_getcsr() & 0xffc0);
}

// What the processor keeps beside its general registers.
static void processor(void) {
    void *got;
    pthread_t thread;
    _MM_SET_FLUSH_ZERO_MODE(_MM_FLUSH_ZERO_ON);
    pthread_create(&thread, NULL, control, NULL);
    pthread_join(thread, &got);
    printf("inherited %lx\n", (unsigned long)(uintptr_t)got);
    long flags = 0, wrong = 0;
    for (int i = 0; i < 200; i++) {
        long result;
        uint64_t before = 0x123456789abcdef, after;
        __asm__ volatile("movq %2, %%xmm15\n\tstc\n\tmov $110, %%eax\n\tsyscall\n\tmovq %%xmm15, %1\n\tsetc "
                         "%b0\n\tmovzbl %b0, %k0"
                         : "=&a"(result), "=&r"(after)
                         : "r"(before)
                         : "rcx", "r11", "xmm15", "memory", "cc");
        flags += result;
        wrong += before != after;
    }
    printf("carry %ld, wrong %ld\n", flags, wrong);
}

static void *churn(void *argument) {
    (void)argument;
    for (int i = 0; i < 50; i++) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(getppid() > 0 ? 0 : 1);
        int status;
        waitpid(pid, &status, 0);
        if (status)
            printf("status %x\n", status);
    }
    return NULL;
}

static void forks(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, churn, NULL);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    printf("forked\n");
}

static void cleanup(void *text) { printf("cleanup %s\n", (char *)text); }

static void *cancelled(void *argument) {
    pthread_cleanup_push(cleanup, argument);
    for (;;)
        pause();
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel(void) {
    pthread_t thread;
    void *result;
    pthread_create(&thread, NULL, cancelled, "of a thread");
    usleep(20000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("cancelled %d\n", result == PTHREAD_CANCELED);
}

// What is given to nobody with an executive; prints nothing that would be the same without.
static void refused(void) {
    int result = prctl(59, 1, 0, 0, 0);
    printf("dispatch %d %s\n", result, strerror(errno));
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        if (strstr(line, "SYSV") && sscanf(line, "%lx-%lx", &start, &end) == 2) {
            printf("unmap %d %s\n", munmap((void *)start, end - start), strerror(errno));
            void *at = mmap((void *)start, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
            printf("map over %d %s\n", at != MAP_FAILED, strerror(errno));
        }
    }
}

static void compatible(void) {
    long result;
    __asm__ volatile("int $0x80" : "=a"(result) : "a"(20L) : "memory", "r8", "r9", "r10", "r11");
    printf("getpid %d\n", result == getpid());
}

static void null(void) {
    for (int i = 0; i < 1000; i++)
        getppid();
    *(volatile int *)16 = 1;
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IONBF, 0);
#define CASE(name, call)                                                                                     \
    if (!strcmp(what, name)) {                                                                               \
        call;                                                                                                \
        return 0;                                                                                            \
    }
    CASE("restart", restart())
    CASE("longjump", longjump())
    CASE("alternate-small", alternate(16384))
    CASE("alternate-roomy", alternate(65536))
    CASE("masks", masks())
    CASE("sigsys", sigsys())
    CASE("sigsys-blocked", sigsys_blocked())
    CASE("sigsys-after", printf("program: blocked %d pending %d\n", is_blocked(), is_pending()))
    CASE("storm", storm())
    CASE("children", children())
    CASE("spawn", spawn())
    CASE("half-stacks", half_stacks())
    CASE("spawners", spawners())
    CASE("thread-exec", thread_exec())
    CASE("processor", processor())
    CASE("forks", forks())
    CASE("cancel", cancel())
    CASE("refused", refused())
    CASE("compatible", compatible())
    CASE("null", null())
    return 2;
}
