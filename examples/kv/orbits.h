/* The server's orbits, all together. */
#ifndef KV_ORBITS_H
#define KV_ORBITS_H

#include "companion.h"
#include "trouble.h"

/* What the server has to know of an auxiliary task. */
struct auxiliary {
    struct companion companion;
    void (*create)(void);
    void (*tick)(void);         /* every 50 ms; may be NULL */
    bool (*call)(enum trouble); /* one round with trouble in its midst; whether the call was made */
};

void orbits_create(void);

/* Whether one of them works for main. */
bool orbits_busy(void);

/* Handles what they have done; to be called every millisecond or so while one works. */
void orbits_glance(void);

/* Does what is due. */
void orbits_tick(void);

void orbits_destroy(void);

/* One by one; NULL at the end. */
struct auxiliary *orbits_at(size_t index);

#endif
