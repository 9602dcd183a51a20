/* Checks for the programs that use objects and instances. */
#ifndef CHECK_PROGRAM_H
#define CHECK_PROGRAM_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <orrery/error.h>

/* Ends the program with what was wrong. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            const char *text = orrery_last_error();                                                          \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno,             \
                    text ? text : "no error");                                                               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

/* The condition, a failure, is met, with this errno, and the library says why. */
#define FAILS(failed, number)                                                                                \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        CHECK(failed);                                                                                       \
        CHECK(errno == (number));                                                                            \
        CHECK(orrery_last_error() && *orrery_last_error());                                                  \
    } while (0)

#endif
