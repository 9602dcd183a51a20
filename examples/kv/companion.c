#include "companion.h"

#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "settings.h"

/* A call under way. Calls end in the order in which they were made. */
struct running {
    struct running *next;
    struct orrery_orbit_future *future;
    struct handler handler;
};

/* An orbit that is dead for good is replaced, but not more often than this. */
#define REPLACE_MICROSECONDS 1000000

static bool create(struct companion *companion) {
    companion->orbit =
        orrery_orbit_create_with(companion->name, companion->entry, companion->init, &companion->options);
    companion->created_us = clock_microseconds();
    return companion->orbit != NULL;
}

struct orrery_orbit_options companion_short_task(void) {
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.when_full = ORRERY_ORBIT_FULL_FAIL;
    options.time_limit_ms = (unsigned)settings.task_limit;
    options.memory = (size_t)settings.orbit_memory;
    options.cpu_percent = 50;
    options.nice = 10;
    return options;
}

void companion_create(struct companion *companion, orrery_orbit_entry entry, void *(*init)(void),
                      const struct orrery_orbit_options *options) {
    companion->entry = entry;
    companion->init = init;
    companion->options = *options;
    if (!create(companion))
        errx(1, "cannot make the orbit %s: %s", companion->name, orrery_last_error());
}

static void remember_trouble(struct companion *companion) {
    const char *text = orrery_last_error();
    snprintf(companion->last_trouble, sizeof companion->last_trouble, "%s", text ? text : strerror(errno));
    for (char *byte = companion->last_trouble; *byte; byte++) {
        if (*byte == '\n' || *byte == '\r')
            *byte = ' ';
    }
}

/* By its policy an orbit that only ever crashes is given up. This server wants it all the same. */
static bool replace(struct companion *companion) {
    if (clock_microseconds() - companion->created_us < REPLACE_MICROSECONDS)
        return false;
    companion->past_restarts = companion_restarts(companion) + 1;
    companion_destroy(companion);
    return create(companion);
}

long companion_restarts(const struct companion *companion) {
    long restarts = companion->orbit ? orrery_orbit_restarts(companion->orbit) : 0;
    return companion->past_restarts + (restarts > 0 ? restarts : 0);
}

bool companion_call(struct companion *companion, const struct sight *sight, const void *argument, size_t size,
                    struct handler handler) {
    struct running *running = malloc(sizeof *running);
    if (!running)
        err(1, "a call");
    struct orrery_area *areas[MEMORY_KINDS];
    for (size_t i = 0; i < sight->count; i++)
        areas[i] = memory_area(sight->memory[i]);
    int64_t begin = clock_microseconds();
    running->future = NULL;
    if (companion->orbit || create(companion))
        running->future =
            orrery_orbit_call_async(companion->orbit, 0, sight->count, areas, NULL, argument, size);
    if (!running->future && errno == EINVAL && replace(companion))
        running->future =
            orrery_orbit_call_async(companion->orbit, 0, sight->count, areas, NULL, argument, size);
    uint64_t took = (uint64_t)(clock_microseconds() - begin);
    if (took > companion->longest_us)
        companion->longest_us = took;
    if (!running->future) {
        remember_trouble(companion);
        companion->not_made++;
        free(running);
        return false;
    }
    running->next = NULL;
    running->handler = handler;
    if (companion->last)
        companion->last->next = running;
    else
        companion->first = running;
    companion->last = running;
    companion->under_way++;
    companion->calls++;
    return true;
}

/* What the task pushed. The updates are data only: what becomes of them is decided here, in main. */
static void receive(struct companion *companion, struct running *running) {
    orrery_orbit_update update;
    long got;
    while ((got = orrery_orbit_pull(running->future, &update)) == 1 || (got < 0 && errno == EBADMSG)) {
        if (got < 0) {
            companion->refused++;
            continue;
        }
        const struct orrery_orbit_record *record = orrery_orbit_update_first(&update);
        for (; record; record = orrery_orbit_update_next(&update, record)) {
            bool good = record->type == ORRERY_ORBIT_RECORD_DATA && running->handler.data &&
                        running->handler.data(record->data, record->size, running->handler.context);
            companion->refused += !good;
        }
        orrery_orbit_update_destroy(&update);
    }
}

void companion_glance(struct companion *companion) {
    while (companion->first) {
        struct running *running = companion->first;
        long value = -1;
        int waited = orrery_orbit_future_wait(running->future, 0, &value);
        if (waited < 0 && errno == ETIMEDOUT)
            return;
        const char *trouble = NULL;
        if (waited < 0) {
            remember_trouble(companion);
            companion->failures++;
            trouble = companion->last_trouble;
        }
        receive(companion, running);
        orrery_orbit_future_destroy(running->future);
        companion->first = running->next;
        if (!companion->first)
            companion->last = NULL;
        companion->under_way--;
        running->handler.done(value, trouble, running->handler.context);
        free(running);
    }
}

void companion_destroy(struct companion *companion) {
    if (companion->orbit)
        orrery_orbit_destroy(companion->orbit);
    companion->orbit = NULL;
}
