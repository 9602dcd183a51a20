/*
 * Runs a program that is linked as a shared library in each of many instances, which all exist: fate COUNT LIBRARY [ARGUMENT...]. What each
 * writes to standard output has to be what the first wrote, which is passed on. With ORRERY_FATE_SECONDS, no other instance has its turn when
 * the process has used so much processor time; at least two have. With ORRERY_FATE_LOG, that file gets a line for each run: in how many
 * instances it ran, of how many, with which status, and what.
 */

#define _GNU_SOURCE

#include "all_instances.h"
#include <getopt.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* Where exit(3) of the program returns to, while it runs. */
static jmp_buf ended;
static volatile int is_running;
static volatile int status;

/* The library finds this one first: a program that exits ends its instance's turn, not the process. */
__attribute__((noreturn)) void exit(int code) {
    if (is_running) {
        status = code;
        longjmp(ended, 1);
    }
    fflush(NULL);
    _exit(code);
}

/* Has a run of the program write to the file in place of standard output. */
static int run(main_function *program, int argc, char **argv, int output) {
    const int before = dup(STDOUT_FILENO);
    if (before < 0 || dup2(output, STDOUT_FILENO) < 0)
        fail("redirect the output");
    /* State of the C library, which all instances share. */
    optind = 0;
    is_running = 1;
    if (setjmp(ended) == 0)
        status = program(argc, argv);
    is_running = 0;
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(before);
    return status;
}

/* Returns the bytes of a memory file. */
static char *contents(int file, size_t *size) {
    struct stat found;
    if (fstat(file, &found) != 0)
        return NULL;
    *size = (size_t)found.st_size;
    char *bytes = malloc(*size + 1);
    return bytes && pread(file, bytes, *size, 0) == (ssize_t)*size ? bytes : NULL;
}

/* Whether the process has used the time that it has. */
static int is_over(void) {
    const char *seconds = getenv("ORRERY_FATE_SECONDS");
    return seconds && clock() / CLOCKS_PER_SEC >= atol(seconds);
}

/* Runs it in all instances, or as many as there is time for, and counts them; returns the status of the first that failed, or 121 where one
   writes something else than the first. */
static int run_all(struct all_instances all, int argc, char **argv, size_t *ran) {
    char *first = NULL;
    size_t first_size = 0;
    for (size_t at = 0; at < all.count && (at < 2 || !is_over()); at++) {
        const int output = memfd_create("output", MFD_CLOEXEC);
        if (output < 0)
            fail("create a file");
        enter(all, at);
        /* The program may change its arguments. */
        char *own[argc + 1];
        for (int argument = 0; argument <= argc; argument++)
            own[argument] = argv[argument] ? strdup(argv[argument]) : NULL;
        const int result = run(all.function, argc, own, output);
        leave(all, at);
        size_t size;
        char *bytes = contents(output, &size);
        close(output);
        if (bytes == NULL)
            fail("read the output");
        if (at == 0) {
            first = bytes;
            first_size = size;
            fwrite(bytes, 1, size, stdout);
            fflush(stdout);
        } else {
            const int differs = size != first_size || memcmp(bytes, first, size) != 0;
            free(bytes);
            if (differs) {
                fprintf(stderr, "fate: instance %zu: its output differs\n", at);
                return 121;
            }
        }
        if (result != 0)
            return result;
        ++*ran;
    }
    free(first);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: fate COUNT LIBRARY [ARGUMENT...]\n");
        return 2;
    }
    const struct all_instances all = create_all(argv[2], "main", argv[1]);
    size_t ran = 0;
    const int result = run_all(all, argc - 2, argv + 2, &ran);
    if (result == 0)
        destroy_all(all);
    const char *log = getenv("ORRERY_FATE_LOG");
    FILE *file = log ? fopen(log, "a") : NULL;
    if (file) {
        const char *slash = strrchr(argv[2], '/');
        fprintf(file, "%zu %zu %d %s", ran, all.count, result, slash ? slash + 1 : argv[2]);
        for (int argument = 3; argument < argc; argument++)
            fprintf(file, " %s", argv[argument]);
        fputc('\n', file);
        fclose(file);
    }
    return result;
}
