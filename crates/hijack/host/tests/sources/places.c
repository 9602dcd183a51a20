/*
 * Makes system calls from several places until standard input is closed: getppid in the C library, getuid in this program's code by another
 * thread, getgid in a library that is loaded at the start, getpgrp in one that is loaded when a byte arrives. Their paths are the arguments; without
 * them, there are no libraries. Prints "ready", and in the end whether a call from a library failed.
 *
 * With CALL, it is such a library, which makes the call of that number.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifdef CALL
#define IS_LIBRARY
#else
#define CALL SYS_getuid
#endif

typedef long make_call_t(void);

make_call_t make_call;

__attribute__((noinline)) long make_call(void) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(CALL) : "rcx", "r11", "memory");
    return result;
}

#ifndef IS_LIBRARY
static atomic_bool ended, failed;
static _Atomic(make_call_t *) libraries[2];

static void pause_shortly(void) { nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); }

static void *call_from_libraries(void *unused) {
    (void)unused;
    while (!ended) {
        for (int i = 0; i < 100; i++) {
            getppid();
            for (int library = 0; library < 2; library++)
                if (libraries[library] && libraries[library]() < 0)
                    failed = true;
        }
        pause_shortly();
    }
    return NULL;
}

static void *call_from_here(void *unused) {
    (void)unused;
    while (!ended) {
        for (int i = 0; i < 100; i++)
            make_call();
        pause_shortly();
    }
    return NULL;
}

static bool load(int index, const char *path) {
#ifdef STATIC
    (void)index;
    return path == NULL;
#else
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    make_call_t *found = library ? (make_call_t *)dlsym(library, "make_call") : NULL;
    libraries[index] = found;
    return found != NULL;
#endif
}

int main(int argc, char **argv) {
    pthread_t threads[2];
    char byte;

    if (argc > 2 && !load(0, argv[1]))
        return 2;
    if (pthread_create(&threads[0], NULL, call_from_libraries, NULL) != 0 ||
        pthread_create(&threads[1], NULL, call_from_here, NULL) != 0)
        return 3;
    puts("ready");
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0) {
        if (argc > 2 && !load(1, argv[2]))
            return 4;
        puts("loaded");
        fflush(stdout);
    }
    ended = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    puts(failed ? "failed" : "made");
    return 0;
}
#endif
