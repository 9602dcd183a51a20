/* Checks for the test programs. */
#ifndef CHECK_H
#define CHECK_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orrery/rollback.h>

/* Ends the program with what was wrong. Uses no buffer, since resumes take buffers back. */
#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            const char *error_ = orrery_last_error();                                                        \
            dprintf(2, "%s:%d: not so: %s (errno %d %s; orrery_last_error: %s)\n", __FILE__, __LINE__,       \
                    #condition, errno, strerror(errno), error_ ? error_ : "none");                           \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

/* The call fails with this number, and says why. */
#define CHECK_ERROR(call, number)                                                                            \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        CHECK((call) == -1);                                                                                 \
        CHECK(errno == (number));                                                                            \
        CHECK(orrery_last_error() && *orrery_last_error());                                                  \
    } while (0)

#include <unistd.h>

#endif
