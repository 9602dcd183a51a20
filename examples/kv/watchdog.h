/* The memory watchdog: counts bytes by type, warns, and picks the keys to evict, which main then deletes. */
#ifndef KV_WATCHDOG_H
#define KV_WATCHDOG_H

#include "orbits.h"
#include "store.h"

/* What it found last. */
struct census {
    uint64_t rounds;
    struct {
        uint64_t keys;
        uint64_t bytes;
    } of[TYPES];
    uint64_t largest;  /* value's bytes */
    uint64_t evicted;  /* keys so far */
    char warning[160]; /* empty while all is well */
};

extern struct auxiliary watchdog;

const struct census *watchdog_census(void);

#endif
