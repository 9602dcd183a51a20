/* Makes system calls in eight threads without a pause until standard input is closed, and says whether each returned what it must. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <unistd.h>

#define THREADS 8

static atomic_bool ended, wrong;

static void *call(void *parent) {
    while (!atomic_load(&ended))
        if (syscall(SYS_getppid) != (long)parent)
            atomic_store(&wrong, true);
    return NULL;
}

int main(void) {
    pthread_t threads[THREADS];
    char byte;

    for (int i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, call, (void *)(long)getppid()) != 0)
            return 1;
    puts("ready");
    fflush(stdout);
    while (read(STDIN_FILENO, &byte, 1) > 0)
        ;
    atomic_store(&ended, true);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    puts(atomic_load(&wrong) ? "wrong" : "right");
    return 0;
}
