// Programs that an executive has to bear: one behaviour per name, which must be the same with and without.
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

// A place that calls and becomes hot; what it calls is to be changed while running.
extern unsigned char site[];
// The 96 bytes that end behind its call.
extern const unsigned char site_window[];
long call_site(void);
__asm__(
    ".text\n.balign 4096\n.globl call_site\ncall_site:\n\tpush %rbp\n\tmov %rsp, %rbp\n.globl site\nsite:\n"
    "\tmov $110, %eax\n\tsyscall\n\tpop %rbp\n\tret\n.globl site_window\n.set site_window, site + 7 - "
    "96\n.balign 4096\n");

static void heat(void) {
    for (int i = 0; i < 100; i++)
        call_site();
}

static void filter(long number, uint32_t what) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)number, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, what),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = 4, .filter = code};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
        printf("no filter: %s\n", strerror(errno));
}

static void children(void) {
    for (int i = 0; i < 3; i++) {
        pid_t pid = fork();
        if (pid == 0)
            _exit(i);
        int status = 0;
        waitpid(pid, &status, 0);
        printf("child %d\n", WEXITSTATUS(status));
    }
}

// A filter has one call fail, before or after its place was rewritten.
static void denied(void) {
    heat();
    filter(SYS_getppid, SECCOMP_RET_ERRNO | 77);
    printf("%ld\n", call_site());
    printf("%ld %d\n", syscall(SYS_getppid), errno);
    children();
    printf("%d\n", system("exit 3") >> 8);
}

// The same, where the executive needs the call itself.
static void denied_to_all(void) {
    filter(SYS_prctl, SECCOMP_RET_ERRNO | EPERM);
    printf("%d %s\n", prctl(PR_SET_NAME, "other"), strerror(errno));
    for (int i = 0; i < 100; i++)
        call_site();
    filter(SYS_rt_sigaction, SECCOMP_RET_ERRNO | EPERM);
    printf("%d\n", signal(SIGUSR1, SIG_IGN) == SIG_ERR);
}

static void *thread_of_filtered(void *result) {
    *(int *)result = 4;
    return NULL;
}

// The same, where the filter ends the process that makes that call: its children and threads, and what it executes, live.
static void killed_by_all(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    heat();
    filter(SYS_prctl, SECCOMP_RET_KILL_PROCESS);
    children();
    int result = 0, status = 0;
    pthread_t thread;
    if (!pthread_create(&thread, NULL, thread_of_filtered, &result))
        pthread_join(thread, NULL);
    printf("thread %d\n", result);
    pid_t pid = vfork();
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", "echo executed; exit 5", NULL);
        _exit(1);
    }
    waitpid(pid, &status, 0);
    printf("program %d, %d\n", WEXITSTATUS(status), WTERMSIG(status));
    printf("%d\n", system("exit 3") >> 8);
    execl("/bin/sh", "sh", "-c", "echo at last; exit 6", NULL);
}

static volatile int trapped;
static void on_trap(int number, siginfo_t *info, void *context) {
    ucontext_t *interrupted = context;
    trapped++;
    if (trapped < 3)
        printf("signal %d, code %d, call %d, architecture %x, rdi %lld\n", number, info->si_code,
               info->si_syscall, info->si_arch, interrupted->uc_mcontext.gregs[REG_RDI]);
    interrupted->uc_mcontext.gregs[REG_RAX] = 4242;
}

// A filter traps a call, which a handler answers: how sandboxes of browsers work.
static void trap(void) {
    struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSYS, &action, NULL);
    filter(SYS_getpriority, SECCOMP_RET_TRAP);
    for (int i = 0; i < 50; i++) {
        long got = syscall(SYS_getpriority, 7, 0);
        if (i == 0 || i == 49)
            printf("%ld\n", got);
    }
    printf("trapped %d\n", trapped);
}

// Nobody handles it.
static void trap_unhandled(void) {
    filter(SYS_getpriority, SECCOMP_RET_TRAP);
    syscall(SYS_getpriority, 7, 0);
    printf("alive\n");
}

static void killed(void) {
    filter(SYS_getpriority, SECCOMP_RET_KILL_PROCESS);
    syscall(SYS_getpriority, 7, 0);
    printf("alive\n");
}

// Read, write, exit and sigreturn are all that is left.
static void strict(void) {
    heat();
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    for (int i = 0; i < 50; i++)
        (void)!write(1, ".", 1);
    (void)!write(1, "\n", 1);
    syscall(SYS_exit, 5);
}

static void strict_and_forbidden(void) {
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
    call_site();
    (void)!write(1, "alive\n", 6);
}

// The time stamp counter is forbidden: to the program, a child, and a program that it executes.
static void no_counter(void) {
    heat();
    printf("%d\n", prctl(PR_SET_TSC, PR_TSC_ENABLE));
    if (prctl(PR_SET_TSC, PR_TSC_SIGSEGV))
        printf("%s\n", strerror(errno));
    heat();
    printf("%ld\n", syscall(SYS_getpriority, 7, 0));
    children();
    // Loaders of dynamic programs read it.
    execlp("busybox", "busybox", "sh", "-c", "(exit 3); echo executed $?", NULL);
    printf("executed 3\n");
}

static unsigned long sum(void) {
    unsigned long total = 0;
    for (int i = 0; i < 4096; i++)
        total = total * 31 + ((unsigned char *)call_site)[i];
    return total;
}

// One byte of a hot place is changed: it calls something else from then on.
static void rewrites(void) {
    heat();
    if (mprotect((void *)call_site, 4096, PROT_READ | PROT_WRITE | PROT_EXEC))
        printf("%s\n", strerror(errno));
    printf("%d\n", site[0]);
    site[1] = SYS_getpid;
    printf("%d\n", call_site() == getpid());
    site[1] = 110;
    mprotect((void *)call_site, 4096, PROT_READ | PROT_EXEC);
    printf("%d %lx\n", call_site() == getppid(), sum());
    heat();
    printf("%d\n", call_site() == getppid());
}

// The page is replaced by another one, at once and by way of a hole.
static void replaces(void) {
    heat();
    unsigned char code[] = {0xb8, SYS_getpid, 0, 0, 0, 0x0f, 0x05, 0xc3};
    void *copy = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(copy, code, sizeof code);
    mprotect(copy, 4096, PROT_READ | PROT_EXEC);
    mremap(copy, 4096, 4096, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)call_site);
    int same = 1;
    for (int i = 0; i < 100; i++)
        same &= call_site() == getpid();
    printf("%d\n", same);
    munmap((void *)call_site, 4096);
    mmap((void *)call_site, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memcpy((void *)call_site, code, sizeof code);
    mprotect((void *)call_site, 4096, PROT_READ | PROT_EXEC);
    for (int i = 0; i < 100; i++)
        same &= call_site() == getpid();
    printf("%d\n", same);
}

// NULL faults when read, written and called, after calls that were rewritten.
static void null_called(void) {
    heat();
    for (int way = 0; way < 4; way++) {
        pid_t pid = fork();
        if (pid == 0) {
            void (*volatile nowhere)(void) = NULL;
            volatile char *volatile nothing = NULL;
            if (way == 0)
                (void)*nothing;
            else if (way == 1)
                *nothing = 1;
            else if (way == 2)
                nowhere();
            else
                (void)nothing[511];
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        printf("signal %d\n", WTERMSIG(status));
    }
}

// Time is read through the vDSO, with nobody in between: a million times in a second or so.
static void clock_is_read(void) {
    struct timespec now;
    for (int i = 0; i < 100000; i++)
        clock_gettime(CLOCK_MONOTONIC, &now);
    printf("read\n");
}

// For a debugger to look at.
__attribute__((noinline)) static int innermost(int number) {
    int *volatile nothing = NULL;
    return *nothing + number;
}

__attribute__((noinline)) static int middle(int number) { return innermost(number + 1) + 1; }

// Reads what nobody writes, from a place that is hot.
__attribute__((noinline)) static int blocked(int *ends) {
    char byte = 0;
    for (int i = 0; i < 60; i++)
        if (write(ends[1], &byte, 1) != 1 || read(ends[0], &byte, 1) != 1)
            return 1;
    puts("blocks");
    return (int)read(ends[0], &byte, 1) + 1;
}

__attribute__((noinline)) static int calls_blocked(int *ends) { return blocked(ends) * 3 + 1; }

// Reads what nobody writes, from a place that never called before.
__attribute__((noinline)) static int blocked_first(int *ends) {
    char byte;
    puts("blocks");
    return (int)read(ends[0], &byte, 1) + 1;
}

__attribute__((noinline)) static int calls_blocked_first(int *ends) { return blocked_first(ends) * 3 + 1; }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;

static int waiting_is_near;

__attribute__((noinline)) static int waits(void) {
    pthread_mutex_lock(&lock);
    waiting_is_near = 1;
    return pthread_cond_wait(&never, &lock) + 1;
}

static void *waiting(void *nothing) { return (char *)nothing + waits(); }

static volatile int slept;

__attribute__((noinline)) static unsigned sleeps(void) {
    for (int i = 0; i < 60; i++)
        usleep(1);
    slept = 1;
    return sleep(1000) + 1;
}

static void *sleeping(void *nothing) { return (char *)nothing + sleeps(); }

// Threads that wait in places of several kinds, whose functions keep something on the stack meanwhile.
static int blocked_threads(int *ends) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, waiting, NULL) || pthread_create(&thread, NULL, sleeping, NULL))
        return 1;
    for (int near = 0; !near || !slept; sched_yield()) {
        pthread_mutex_lock(&lock);
        near = waiting_is_near;
        pthread_mutex_unlock(&lock);
    }
    return calls_blocked(ends) + 1;
}

volatile long turns;

__attribute__((noinline)) void turn(void) { turns += call_site() > 0; }

// The key under which an executive remembers what is to become of a site: the hash of the 96 bytes before its end.
static uint64_t key_of(const void *code) {
    uint64_t words[12], hash = 0xcbf29ce484222325;
    memcpy(words, code, sizeof words);
    for (size_t i = 0; i < 12; i++) {
        hash = (hash ^ words[i]) * 0x00000100000001b3;
        hash ^= hash >> 29;
    }
    return hash | (uint64_t)1 << 63;
}

// What is remembered about its parent's code, a child without privileges can change nowhere: it would be the parent's code next.
static void others_verdicts(void) {
    // Before it is rewritten.
    uint64_t key = key_of(site_window);
    heat();
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        if (getuid() == 0 && (setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534)))
            _exit(2);
        int changed = 0;
        char line[512];
        FILE *maps = fopen("/proc/self/maps", "r");
        while (maps && fgets(line, sizeof line, maps)) {
            unsigned long start, end, number;
            char rights[5];
            if (!strstr(line, "/SYSV") ||
                sscanf(line, "%lx-%lx %4s %*s %*s %lu", &start, &end, rights, &number) != 4)
                continue;
            if (rights[1] != 'w' && mprotect((void *)start, end - start, PROT_READ | PROT_WRITE) != 0)
                continue;
            for (volatile uint64_t *word = (volatile uint64_t *)start; (unsigned long)word < end; word++)
                if (*word == key)
                    changed++;
        }
        printf("%d can be changed\n", changed);
        fflush(stdout);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    printf("the child ends with %d, the parent goes on: %d\n", WEXITSTATUS(status), call_site() == getppid());
}

// The secret. It is nowhere in the program: what is behind a path is logged with it.
static const char *secret_text(char text[32]) {
    static const char shifted[] = "poma!uif!qbsfou(t!tfdsfu";
    for (size_t i = 0; i <= sizeof shifted - 1; i++)
        text[i] = shifted[i] ? (char)(shifted[i] - 1) : 0;
    return text;
}

// Every mapping of shared memory by number that can be read: how often this is in it. What can be written is overwritten.
static int shared_memory_holds_secret(void) {
    int found = 0;
    char text[32];
    const char *secret = secret_text(text);
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char rights[5];
        if (!strstr(line, "/SYSV") || sscanf(line, "%lx-%lx %4s", &start, &end, rights) != 3 ||
            rights[0] != 'r')
            continue;
        for (char *at = (char *)start; at && (unsigned long)at + strlen(secret) <= end;) {
            at = memmem(at, end - (unsigned long)at, secret, strlen(secret));
            found += at != NULL;
            at = at ? at + 1 : NULL;
        }
        if (rights[1] == 'w')
            memset((void *)start, 0xa5, end - start);
    }
    if (maps)
        fclose(maps);
    return found;
}

// What the parent reads and writes: its child is to find nothing of it.
static void use_secret(int file) {
    char secret[32];
    secret_text(secret);
    (void)!pwrite(file, secret, strlen(secret), 0);
    memset(secret, 0, sizeof secret);
    (void)!pread(file, secret, sizeof secret - 1, 0);
    memset(secret, 0, sizeof secret);
    // It is not in the last entry, which a child may have a copy of.
    usleep(1000);
}

static int give_up(int way) {
    if (getuid() != 0)
        return 0;
    // At once, one after the other, and by way of what can be undone.
    if (way == 1)
        return setgid(65534) || setuid(65534);
    if (way == 2 && (setegid(65534) || seteuid(65534) || seteuid(0) || setegid(0)))
        return 1;
    return setresgid(65534, 65534, 65534) || setresuid(65534, 65534, 65534);
}

// A child that has given up its privileges, and what it executes, share nothing with its parent any more: they neither read what the
// parent logs, nor do they change what it counts or asks for. (Who had none shares all with itself.)
static void others_journals(const char *own) {
    FILE *file = tmpfile();
    int privileged = getuid() == 0;
    use_secret(fileno(file));
    for (int way = 0; way < 4; way++) {
        int ends[2];
        if (pipe(ends))
            return;
        // The last one shares memory until it executes.
        pid_t child = way == 3 ? vfork() : fork();
        if (child == 0) {
            if (give_up(way))
                _exit(9);
            if (way != 3) {
                char byte;
                close(ends[1]);
                (void)!read(ends[0], &byte, 1);
                int found = privileged ? shared_memory_holds_secret() : 0;
                printf("%d in a child\n", found);
            }
            execl(own, own, privileged ? "finds" : "finds-nothing", NULL);
            _exit(8);
        }
        close(ends[0]);
        use_secret(fileno(file));
        close(ends[1]);
        int status;
        waitpid(child, &status, 0);
        printf("way %d: %d\n", way, status);
    }
    for (int i = 0; i < 40; i++)
        call_site();
    printf("%d\n", system("exit 3") >> 8);
    children();
}

// Children that count their calls, and become other users meanwhile.
static void become(void) {
    for (int child = 0; child < 3; child++) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int i = 0; i < 300; i++) {
                if (i == 100 && setresgid(60000 + child, 60000, 60000))
                    _exit(1);
                if (i == 200 && setresuid(60000 + child, 60000, 60000))
                    _exit(1);
                syscall(SYS_getpriority, 1000 + child, i);
            }
            _exit(0);
        }
    }
    int status, all = 0;
    while (wait(&status) > 0)
        all |= status;
    printf("%s\n", all ? "failed" : "became");
}

// As much as an ordinary user may lock by default.
static void lock_all(void) {
    struct rlimit limit;
    limit.rlim_cur = limit.rlim_max = 8 << 20;
    setrlimit(RLIMIT_MEMLOCK, &limit);
    printf("%d\n", mlockall(MCL_CURRENT | MCL_FUTURE));
    children();
}

__attribute__((noinline)) static void spin(void) {
    for (;;)
        turn();
}

int main(int count, char **words) {
    const char *what = count > 1 ? words[1] : "";
    setvbuf(stdout, NULL, _IONBF, 0);
#define CASE(name, call)                                                                                     \
    if (!strcmp(what, name)) {                                                                               \
        call;                                                                                                \
        return 0;                                                                                            \
    }
    CASE("denied", denied())
    CASE("denied-to-all", denied_to_all())
    CASE("killed-by-all", killed_by_all())
    CASE("trap", trap())
    CASE("trap-unhandled", trap_unhandled())
    CASE("killed", killed())
    CASE("strict", strict())
    CASE("strict-and-forbidden", strict_and_forbidden())
    CASE("no-counter", no_counter())
    CASE("rewrites", rewrites())
    CASE("replaces", replaces())
    CASE("null-called", null_called())
    CASE("clock", clock_is_read())
    CASE("verdicts", others_verdicts())
    CASE("journals", others_journals(words[0]))
    CASE("locks", lock_all())
    CASE("becomes", become())
    CASE("finds", printf("%d executed\n", shared_memory_holds_secret()))
    CASE("finds-nothing", printf("0 executed\n"))
    CASE("crash", {
        heat();
        printf("%d\n", middle(getpid()));
    })
    CASE("blocks", {
        int ends[2];
        printf("%d\n", pipe(ends) ? 0 : calls_blocked(ends));
    })
    CASE("blocks-first", {
        int ends[2];
        printf("%d\n", pipe(ends) ? 0 : calls_blocked_first(ends));
    })
    CASE("blocks-threads", {
        int ends[2];
        printf("%d\n", pipe(ends) ? 0 : blocked_threads(ends));
    })
    CASE("spins", {
        heat();
        puts("spins");
        spin();
    })
    return 2;
}
