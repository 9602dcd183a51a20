/* An orbit as the event loop has it: calls are never waited for, their outcomes are collected in passing. */
#ifndef KV_COMPANION_H
#define KV_COMPANION_H

#include "memory.h"
#include "slice.h"

struct running;

struct companion {
    const char *name;
    struct orrery_orbit *orbit;
    orrery_orbit_entry entry;
    void *(*init)(void);
    struct orrery_orbit_options options;
    int64_t created_us;
    long past_restarts; /* of orbits before this one, and their replacement */
    struct running *first;
    struct running *last;
    unsigned under_way;
    uint64_t calls;
    uint64_t failures;   /* calls that the orbit did not survive */
    uint64_t not_made;   /* calls that were not even made */
    uint64_t longest_us; /* for which main was kept busy by a call */
    uint64_t refused;    /* of what it pushed back */
    char last_trouble[200];
};

/* What happens in main when a call is over. `context` is the caller's. */
struct handler {
    /* Once for each piece of data that the task pushed, crash or not. NULL: nothing is expected. Says whether
     * it made sense. */
    bool (*data)(const void *data, size_t size, uint64_t context);
    /* In the end. `trouble` is NULL after success. */
    void (*done)(long value, const char *trouble, uint64_t context);
    uint64_t context;
};

/* What suits a task of milliseconds: bounded by the settings, half a processor, after everybody else. */
struct orrery_orbit_options companion_short_task(void);

/* Ends the program where the orbit cannot be made. */
void companion_create(struct companion *companion, orrery_orbit_entry entry, void *(*init)(void),
                      const struct orrery_orbit_options *options);

/* Which memory a task looks at. */
struct sight {
    size_t count;
    enum memory memory[MEMORY_KINDS];
};

/* Calls. If that fails, `done` was not called, and `last_trouble` says why. */
bool companion_call(struct companion *companion, const struct sight *sight, const void *argument, size_t size,
                    struct handler handler);

/* Handles the calls that are over. */
void companion_glance(struct companion *companion);

/* How often it came back. */
long companion_restarts(const struct companion *companion);

void companion_destroy(struct companion *companion);

#endif
