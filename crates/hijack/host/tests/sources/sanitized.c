// Threads that open files and allocate, in a program of AddressSanitizer, whose leak checker looks at all memory at the end.
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static void *work(void *none) {
    for (int i = 0; i < 50; i++) {
        struct stat status;
        char *memory = malloc(100);
        int file = open("/etc/passwd", O_RDONLY);
        if (memory && file >= 0 && read(file, memory, 100) > 0)
            stat("/etc/group", &status);
        close(file);
        free(memory);
    }
    return none;
}

int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, work, NULL))
            return 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    puts("worked");
    return 0;
}
