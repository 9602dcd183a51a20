/* Checks for programs that are written for the authors' library of orbits. */
#ifndef CHECK_AUTHORS_H
#define CHECK_AUTHORS_H

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Ends the program with what was wrong. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        int errno_ = errno;                                                                                  \
        if (!(condition)) {                                                                                  \
            dprintf(2, "%s:%d: not so: %s (errno %d %s)\n", __FILE__, __LINE__, #condition, errno_,          \
                    strerror(errno_));                                                                       \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

#endif
