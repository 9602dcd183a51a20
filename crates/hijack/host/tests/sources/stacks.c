// What calls take of the stacks that they are made on: stacks CASE [ARGUMENT].
//
// depth BYTES      no call writes more than so many bytes below the stack pointer
// least            a thread of the least stack that there is opens and reads files
// alternate        one thread has a large alternate stack, another one of the classic size; both make calls
// jumps COUNT      handlers leave so many waiting calls for good, by siglongjmp: the process does not grow by that
// small            no call writes below a stack of 2 KiB, as a goroutine's is, in a program with a large alternate stack
// small-early      the same; the same instruction has made calls on a large stack before
// ended COUNT      so many threads end in handlers that interrupted a waiting call: neither by that
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, AGAIN = 64, CLASSIC = 8192, ROOMY = 1 << 16, BIG = 1 << 17, SMALL = 2048 };

static char painted[BIG] __attribute__((aligned(64)));
static size_t deepest;

// The call with the stack pointer at `top`: one instruction for all, and one of its own for the call that is made by none else.
static long call_on(char *top, long number, const long a[4]) {
    long result;
    register long r10 __asm__("r10") = a[3];
    __asm__ volatile("movq %%rsp, %%rbx\n"
                     "movq %[top], %%rsp\n"
                     "syscall\n"
                     "movq %%rbx, %%rsp\n"
                     : "=a"(result)
                     : "a"(number), [top] "r"(top), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10)
                     : "rbx", "rcx", "r11", "memory");
    return result;
}

static long open_on(char *top) {
    long result;
    __asm__ volatile("movq %%rsp, %%rbx\n"
                     "movq %[top], %%rsp\n"
                     "movl $257, %%eax\n"
                     "syscall\n"
                     "movq %%rbx, %%rsp\n"
                     : "=a"(result)
                     : [top] "r"(top), "D"((long)AT_FDCWD), "S"("/nowhere/at/all"), "d"(0L)
                     : "rbx", "rcx", "r11", "memory");
    return result;
}

static void measure(long number, long a, long b, long c, long d) {
    char *top = painted + sizeof(painted) - PAGE;
    long arguments[4] = {a, b, c, d};
    for (int i = 0; i < AGAIN; i++) {
        memset(painted, 0x5a, sizeof(painted));
        if (number < 0)
            open_on(top);
        else
            call_on(top, number, arguments);
        size_t kept = 0;
        while (kept < sizeof(painted) && painted[kept] == 0x5a)
            kept++;
        size_t used = kept < (size_t)(top - painted) ? (size_t)(top - painted) - kept : 0;
        deepest = used > deepest ? used : deepest;
    }
}

static int depth(size_t most) {
    struct stat status;
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/nowhere/socket"};
    char byte[PAGE] = "";
    struct iovec buffer = {byte, 1};
    struct msghdr header = {
        .msg_name = &address, .msg_namelen = sizeof(address), .msg_iov = &buffer, .msg_iovlen = 1};
    struct mmsghdr headers[2] = {{.msg_hdr = header}, {.msg_hdr = header}};
    struct timespec none = {0, 0};
    char *const words[] = {"nothing", NULL};
    unsigned long set = 0;
    int stream = socket(AF_UNIX, SOCK_STREAM, 0);
    measure(-1, 0, 0, 0, 0);
    measure(SYS_getppid, 0, 0, 0, 0);
    measure(SYS_openat, AT_FDCWD, (long)"nowhere/relative", 0, 0);
    measure(SYS_stat, (long)"/etc/passwd", (long)&status, 0, 0);
    measure(SYS_rename, (long)"/nowhere/one", (long)"/nowhere/other", 0, 0);
    measure(SYS_read, 0, (long)byte, 0, 0);
    measure(SYS_connect, stream, (long)&address, sizeof(address), 0);
    measure(SYS_sendmsg, stream, (long)&header, 0, 0);
    measure(SYS_sendmmsg, stream, (long)headers, 2, 0);
    measure(SYS_mprotect, (long)painted & -PAGE, PAGE, PROT_READ | PROT_WRITE, 0);
    measure(SYS_execve, (long)"/nowhere/program", (long)words, (long)words, 0);
    measure(SYS_ppoll, 0, 0, (long)&none, (long)&set);
    measure(SYS_rt_sigprocmask, SIG_BLOCK, (long)&set, 0, sizeof(set));
    measure(SYS_rt_sigaction, SIGUSR1, 0, (long)byte, sizeof(set));
    if (deepest > most)
        printf("%zu bytes below the stack pointer, of %zu\n", deepest, most);
    return deepest > most;
}

static int missing(char *top) {
    int count = 0;
    for (int i = 0; i < AGAIN; i++)
        count += open_on(top) == -ENOENT;
    return count;
}

static int small(int early) {
    static char roomy[ROOMY];
    char *top = painted + sizeof(painted);
    if (early)
        printf("before: %d\n", missing(top));
    stack_t stack = {.ss_sp = roomy, .ss_size = sizeof(roomy)};
    if (sigaltstack(&stack, NULL) != 0) {
        perror("sigaltstack");
        return 1;
    }
    memset(painted, 0x5a, sizeof(painted));
    printf("on the small stack: %d\n", missing(top));
    int changed = 0;
    for (size_t i = 0; i < sizeof(painted) - SMALL; i++)
        changed += painted[i] != 0x5a;
    printf("changed below it: %d\n", changed);
    return changed != 0;
}

static long open_some(void) {
    long count = 0;
    for (int i = 0; i < AGAIN; i++) {
        struct stat status;
        char text[16];
        int file = open("/etc/passwd", O_RDONLY);
        count += file >= 0 && read(file, text, sizeof(text)) > 0;
        close(file);
        count += stat("/etc/group", &status) == 0;
    }
    return count;
}

static void *opens(void *none) {
    (void)none;
    return (void *)open_some();
}

static int least(void) {
    pthread_attr_t attributes;
    pthread_t thread;
    void *opened;
    // As large as it is where nobody is beneath the program.
    pthread_attr_init(&attributes);
    int error = pthread_attr_setstacksize(&attributes, 16384);
    error = error ? error : pthread_create(&thread, &attributes, opens, NULL);
    error = error ? error : pthread_join(thread, &opened);
    printf("%s: %ld\n", strerror(error), error ? 0 : (long)opened);
    return error;
}

static void *opens_with_classic(void *none) {
    char *start = mmap(NULL, PAGE + CLASSIC, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t stack = {.ss_sp = start + PAGE, .ss_size = CLASSIC};
    if (start == MAP_FAILED || mprotect(start + PAGE, CLASSIC, PROT_READ | PROT_WRITE) ||
        sigaltstack(&stack, NULL))
        return none;
    return opens(none);
}

static int alternate(void) {
    static char roomy[ROOMY];
    stack_t stack = {.ss_sp = roomy, .ss_size = sizeof(roomy)};
    pthread_t thread;
    void *opened = NULL;
    int error = sigaltstack(&stack, NULL) ? errno : pthread_create(&thread, NULL, opens_with_classic, NULL);
    error = error ? error : pthread_join(thread, &opened);
    printf("%s: %ld and %ld\n", strerror(error), (long)opened, open_some());
    return error;
}

static sigjmp_buf back;

static void leave(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static const char *volatile waits_for;

// Waits where no one writes, until a signal comes; each time with another part of the stack in use.
static void wait_below(size_t room) {
    volatile char used[64 + room];
    used[0] = 1;
    used[63 + room] = used[0];
    int file = open(waits_for, O_RDONLY);
    if (file >= 0)
        close(file);
}

// Pages of this process, as `statm` has it first.
static long pages(void) {
    char text[32] = "";
    int file = open("/proc/self/statm", O_RDONLY);
    ssize_t length = read(file, text, sizeof(text) - 1);
    close(file);
    return length > 0 ? atol(text) : 0;
}

enum { FIRST = 60, MOST_PAGES = 256 };

// Says whether the process has grown, but for what came first.
static void report(const char *what, int count, long before) {
    long grown = pages() - before;
    if (grown > MOST_PAGES)
        printf("%ld pages more\n", grown);
    printf("%s %d, then %ld\n", what, count, open_some());
}

static int jumps(int count) {
    struct sigaction action = {.sa_handler = leave};
    sigaction(SIGALRM, &action, NULL);
    volatile int left = 0;
    volatile long before = 0;
    for (volatile int i = 0; i < count; i++) {
        if (i == FIRST)
            before = pages();
        timer_t timer;
        struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGALRM};
        struct itimerspec soon = {.it_value = {0, 2000000}};
        if (timer_create(CLOCK_MONOTONIC, &event, &timer))
            return 1;
        if (sigsetjmp(back, 1) == 0) {
            timer_settime(timer, 0, &soon, NULL);
            wait_below((size_t)(i % 7) * 512);
        } else {
            left++;
        }
        timer_delete(timer);
    }
    report("left", left, before);
    return 0;
}

static void end(int signal) {
    (void)signal;
    pthread_exit(NULL);
}

static void *waits(void *none) {
    wait_below(0);
    return none;
}

static int ended(int count) {
    struct sigaction action = {.sa_handler = end};
    sigaction(SIGUSR1, &action, NULL);
    struct timespec soon = {0, 1000000};
    long before = 0;
    for (int i = 0; i < count; i++) {
        if (i == FIRST)
            before = pages();
        pthread_t thread;
        if (pthread_create(&thread, NULL, waits, NULL))
            return 1;
        nanosleep(&soon, NULL);
        // The thread may not have come to its call yet: then it ends where it is.
        pthread_kill(thread, SIGUSR1);
        pthread_join(thread, NULL);
    }
    report("ended", count, before);
    return 0;
}

static int with_fifo(int (*use)(int), int count) {
    char name[] = "/tmp/orrery-fifo-XXXXXX";
    if (!mkdtemp(name))
        return 1;
    char fifo[64];
    snprintf(fifo, sizeof(fifo), "%s/fifo", name);
    int result = mkfifo(fifo, 0600);
    waits_for = fifo;
    result = result ? result : use(count);
    unlink(fifo);
    rmdir(name);
    return result;
}

int main(int words, char **word) {
    if (words < 2)
        return 2;
    int number = words > 2 ? atoi(word[2]) : 0;
    if (!strcmp(word[1], "depth"))
        return depth((size_t)number);
    if (!strcmp(word[1], "small") || !strcmp(word[1], "small-early"))
        return small(word[1][5] != 0);
    if (!strcmp(word[1], "least"))
        return least();
    if (!strcmp(word[1], "alternate"))
        return alternate();
    if (!strcmp(word[1], "jumps"))
        return with_fifo(jumps, number);
    if (!strcmp(word[1], "ended"))
        return with_fifo(ended, number);
    return 2;
}
