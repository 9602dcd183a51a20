/* The dump: the data as they were when it began, in a file that is there as a whole or not at all. */
#ifndef KV_DUMP_H
#define KV_DUMP_H

#include "client.h"
#include "orbits.h"

extern struct auxiliary dump;

struct dump_state {
    int64_t last_save; /* seconds since 1970 */
    bool last_failed;
    char last_trouble[200];
    uint64_t dumps;
    int64_t start_us; /* for which main was kept busy by the last start */
    int64_t took_us;  /* from start to end */
    int64_t keys;
};

const struct dump_state *dump_state(void);

bool dump_is_running(void);

/* Begins one; a client, unless it is NULL, is answered at its end. False, with a reply to be made, if it
 * cannot. */
bool dump_start(enum trouble trouble, struct client *waiting);

/* Looks after a forked dump. */
void dump_glance(void);

/* Ends a dump that is being written. */
void dump_abandon(void);

#endif
