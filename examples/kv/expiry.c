#include "expiry.h"

#include <string.h>

#include "clock.h"
#include "settings.h"
#include "store.h"

/* How many are pushed at once, and how many in one round. */
#define BATCH 256
#define MOST 20000

struct question {
    enum trouble trouble;
    const struct deadlines *deadlines;
    int64_t now;
};

/* A deadline and its place in the list. */
struct passed {
    size_t index;
    struct deadline deadline;
};

/* ---- in the orbit ---- */

struct batch {
    orrery_orbit_update *update;
    size_t count;
    struct passed list[BATCH];
};

static void push(struct batch *batch) {
    if (batch->count > 0 &&
        orrery_orbit_update_add_data(batch->update, batch->list, batch->count * sizeof *batch->list) == 0)
        orrery_orbit_push(batch->update);
    batch->count = 0;
}

/* From the end: what main deletes only moves deadlines that come behind. */
static long look(void *argument, void *store) {
    (void)store;
    const struct question *question = argument;
    const struct deadlines *deadlines = question->deadlines;
    struct batch batch = {.update = orrery_orbit_update_create()};
    long found = 0;
    for (size_t i = deadlines->count; i-- > 0 && found < MOST;) {
        if (i == deadlines->count / 2)
            trouble_make(question->trouble);
        bool lie = question->trouble == TROUBLE_LIE;
        if (deadlines->list[i].at > question->now && !lie)
            continue;
        batch.list[batch.count++] = (struct passed){i, deadlines->list[i]};
        found++;
        if (batch.count == BATCH)
            push(&batch);
    }
    if (deadlines->count == 0)
        trouble_make(question->trouble);
    push(&batch);
    orrery_orbit_update_destroy(batch.update);
    return found;
}

/* ---- in main ---- */

static bool take(const void *data, size_t size, uint64_t context) {
    (void)context;
    bool all = size % sizeof(struct passed) == 0;
    for (size_t at = 0; at + sizeof(struct passed) <= size; at += sizeof(struct passed)) {
        struct passed passed;
        memcpy(&passed, (const char *)data + at, sizeof passed);
        all = store_expire(passed.index, passed.deadline) && all;
    }
    return all;
}

static void done(long value, const char *trouble, uint64_t context) {
    (void)value, (void)trouble, (void)context;
}

static void create(void) {
    struct orrery_orbit_options options = companion_short_task();
    companion_create(&expiry.companion, look, NULL, &options);
}

static bool call(enum trouble trouble) {
    static const struct sight sight = {1, {MEMORY_DEADLINES}};
    struct question question = {trouble, store_deadlines(), clock_milliseconds()};
    return companion_call(&expiry.companion, &sight, &question, sizeof question,
                          (struct handler){.data = take, .done = done});
}

static void tick(void) {
    if (settings.active_expiry && store_deadlines()->count > 0 && expiry.companion.under_way == 0)
        call(TROUBLE_NONE);
}

struct auxiliary expiry = {.companion.name = "expiry", .create = create, .tick = tick, .call = call};
