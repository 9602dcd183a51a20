// Uses protection keys (pkeys(7)) and prints what a program can see of them: the same with an executive.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

// Bits of PKRU that belong to a key.
static unsigned rights(int key) {
    unsigned value, high;
    __asm__ volatile("rdpkru" : "=a"(value), "=d"(high) : "c"(0));
    return value >> (2 * key) & 3;
}

static char *page;
static int zero, key;

static const char *outcome(long result) { return result >= 0 ? "ok" : strerror(errno); }

static void read_there(const char *who) {
    int good = 0, bad = 0;
    // Many times from one place: rewritten calls and dispatched ones.
    for (int i = 0; i < 60; i++)
        if (read(zero, page + 100, 10) == 10)
            good++;
        else
            bad++;
    printf("%s: %d reads into the page, %d failed, rights %u\n", who, good, bad, rights(key));
}

static void *thread(void *argument) {
    (void)argument;
    read_there("a thread");
    return NULL;
}

static void handler(int signal) {
    (void)signal;
    printf("a handler: rights %u\n", rights(key));
    // Only for the handler: what was interrupted has its own.
    pkey_set(key, 0);
    getppid();
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    key = pkey_alloc(0, 0);
    if (key < 0) {
        printf("no keys: %s\n", strerror(errno));
        return 77;
    }
    zero = open("/dev/zero", O_RDONLY);
    page = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("given to the page: %s, rights %u\n",
           outcome(pkey_mprotect(page, 8192, PROT_READ | PROT_WRITE, key)), rights(key));
    strcpy(page, "/dev/null");
    read_there("main");
    printf("a path there: %s\n", outcome(open(page, O_RDONLY)));
    pthread_t other;
    pthread_create(&other, NULL, thread, NULL);
    pthread_join(other, NULL);
    pid_t child = fork();
    if (child == 0) {
        read_there("a child");
        _exit(0);
    }
    waitpid(child, NULL, 0);

    pkey_set(key, PKEY_DISABLE_WRITE);
    printf("write disabled: read %s, ", outcome(read(zero, page, 10)));
    printf("write %s, ", outcome(write(open("/dev/null", O_WRONLY), page, 10)));
    printf("rights %u\n", rights(key));
    pkey_set(key, PKEY_DISABLE_ACCESS);
    for (int i = 0; i < 30; i++) {
        long result = read(zero, page, 10);
        if (i % 29 == 0)
            printf("access disabled: read %s, rights %u\n", outcome(result), rights(key));
    }
    pkey_set(key, PKEY_DISABLE_WRITE);
    signal(SIGUSR1, handler);
    raise(SIGUSR1);
    printf("after the handler: rights %u\n", rights(key));
    child = vfork();
    if (child == 0)
        _exit((int)rights(key));
    int status;
    waitpid(child, &status, 0);
    printf("a child by vfork: rights %d, then %u\n", WEXITSTATUS(status), rights(key));
    // A key is given by the call itself, which changes the register.
    int second = pkey_alloc(0, PKEY_DISABLE_WRITE);
    printf("another key: rights %u and %u\n", rights(second), rights(key));
    pkey_set(key, 0);
    read_there("main again");
    return 0;
}
