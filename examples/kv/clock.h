/* The time. */
#ifndef KV_CLOCK_H
#define KV_CLOCK_H

#include <stdint.h>
#include <time.h>

/* Since 1970. */
static inline int64_t clock_milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Since whenever, never going back. */
static inline int64_t clock_microseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

#endif
