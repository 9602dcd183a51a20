/* Checks for the test programs of orbits. */
#ifndef CHECK_ORBIT_H
#define CHECK_ORBIT_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <orrery/orbit.h>

/* Ends the program with what was wrong. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        int errno_ = errno;                                                                                  \
        if (!(condition)) {                                                                                  \
            const char *error_ = orrery_last_error();                                                        \
            dprintf(2, "%s:%d: not so: %s (errno %d %s; orrery_last_error: %s)\n", __FILE__, __LINE__,       \
                    #condition, errno_, strerror(errno_), error_ ? error_ : "none");                         \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

/* The expression has this value, with this errno, and says why. */
#define CHECK_FAILS(expression, value, number)                                                               \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        CHECK((expression) == (value));                                                                      \
        CHECK(errno == (number));                                                                            \
        CHECK(orrery_last_error() && *orrery_last_error());                                                  \
    } while (0)

#endif
