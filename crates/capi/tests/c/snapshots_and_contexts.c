/* Snapshots and contexts together: a resumed root keeps its contexts, a context has snapshots of its own. */
#include "check.h"

#include <orrery/context.h>

static volatile int state;

/* In a context: counts its calls. */
static void count(int caller) {
    for (uint64_t calls = 1;; calls++) {
        caller = orrery_context_switch(caller, calls, NULL);
        CHECK(caller >= 0);
    }
}

static int make(void (*what)(int)) {
    int caller;
    uint64_t args;
    int new = orrery_context_create(NULL, 0, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        what(caller);
    return new;
}

static uint64_t call(int context) {
    uint64_t result;
    CHECK(orrery_context_switch(context, 0, &result) == context);
    return result;
}

/* In a context: goes back, again and again, and tells how often it has been here. */
static void go_back(int caller) {
    orrery_rollback_snapshot_t start;
    state = 10;
    int round = orrery_rollback_snapshot(&start);
    CHECK(round >= 0);
    CHECK(state == 10);
    state += round + 1;
    /* Control leaves and comes back between the snapshot and its return. */
    for (int step = 0; step < 3; step++)
        CHECK(orrery_context_switch(caller, (uint64_t)(100 * round + state), NULL) == caller);
    orrery_rollback_resume(start, round + 1);
    CHECK(!"resumed");
}

int main(void) {
    static int later;
    int before = make(count);
    CHECK(call(before) == 1);

    orrery_rollback_snapshot_t start;
    int round = orrery_rollback_snapshot(&start);
    CHECK(round >= 0);
    CHECK(later == 0);
    CHECK(call(before) == (uint64_t)(2 + 2 * round));
    if (round < 3) {
        later = make(count);
        CHECK(call(later) == 1 && call(later) == 2 && call(before) == (uint64_t)(3 + 2 * round));
        if (round == 1)
            CHECK(orrery_context_close(before) == 0);
        orrery_rollback_resume(start, round + 1);
        CHECK(!"resumed");
    }
    CHECK(orrery_rollback_discard(start) == 0);

    int traveller = make(go_back);
    for (int visit = 0; visit < 4; visit++)
        for (int step = 0; step < 3; step++)
            CHECK(call(traveller) == (uint64_t)(100 * visit + 10 + visit + 1));
    CHECK(orrery_context_close(traveller) == 0 && orrery_context_close(before) == 0);
    CHECK_ERROR(orrery_context_switch(before, 0, NULL), EBADF);
    return 0;
}
