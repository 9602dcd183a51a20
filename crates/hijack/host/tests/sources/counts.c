// Makes calls in all the ways in which counters could lose one, and says how many they were.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static unsigned long *made;

static inline void call(void) {
    long result;
    __atomic_fetch_add(made, 1, __ATOMIC_RELAXED);
    __asm__ volatile("mov $110, %%eax\n\tsyscall" : "=a"(result) : : "rcx", "r11", "memory");
}

static void call_often(int times) {
    for (int i = 0; i < times; i++)
        call();
}

static void *thread(void *times) {
    call_often((long)times);
    return NULL;
}

static void together(int threads, long times) {
    pthread_t all[16];
    for (int i = 0; i < threads; i++)
        pthread_create(&all[i], NULL, thread, (void *)times);
    call_often(times);
    for (int i = 0; i < threads; i++)
        pthread_join(all[i], NULL);
}

static void tick(int signal) {
    (void)signal;
    call_often(3);
}

// A thread with the thread pointer of its parent.
static int twin(void *times) {
    call_often((long)times);
    syscall(SYS_exit, 0);
    return 0;
}

int main(int argc, char **argv) {
    int memory = argc > 1 ? atoi(argv[1]) : memfd_create("made", 0);
    made = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (argc > 1) {
        call_often(1000);
        return 0;
    }
    if (made == MAP_FAILED) { // The file is empty yet.
        return 1;
    }
    ftruncate(memory, 4096);
    char number[12];
    snprintf(number, sizeof number, "%d", memory);
    signal(SIGALRM, tick);
    struct itimerval often = {{0, 300}, {0, 300}};
    setitimer(ITIMER_REAL, &often, NULL);
    call_often(20000);
    for (int i = 0; i < 4; i++) {
        if (fork() == 0) {
            call_often(5000);
            together(3, 5000);
            _exit(0);
        }
        call_often(5000);
        if (vfork() == 0) {
            call_often(50);
            _exit(0);
        }
        char *words[] = {argv[0], number, NULL};
        pid_t child;
        posix_spawn(&child, "/proc/self/exe", NULL, NULL, words, environ);
        call_often(5000);
    }
    together(6, 20000);
    static char stack[65536] __attribute__((aligned(16)));
    clone(twin, stack + sizeof stack, CLONE_VM | CLONE_FS | CLONE_FILES | SIGCHLD, (void *)40000);
    call_often(40000);
    struct itimerval never = {0};
    setitimer(ITIMER_REAL, &never, NULL);
    while (wait(NULL) > 0)
        ;
    printf("%lu\n", *made);
    return 0;
}
