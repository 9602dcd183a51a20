/* Snapshots and contexts together: a resumed root keeps its contexts, a context has snapshots of its own. */
#include "check.h"

#include <orrery/context.h>

static volatile int state;

/* In a context: counts its calls. */
static void count(int caller) {
    for (uint64_t calls = 1;; calls++) {
        caller = lwSwitch(caller, calls, NULL);
        CHECK(caller >= 0);
    }
}

static int make(void (*what)(int)) {
    int caller;
    uint64_t args;
    int new = lwCreate(NULL, 0, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        what(caller);
    return new;
}

static uint64_t call(int context) {
    uint64_t result;
    CHECK(lwSwitch(context, 0, &result) == context);
    return result;
}

/* In a context: goes back, again and again, and tells how often it has been here. */
static void go_back(int caller) {
    lw_snapshot_t start;
    state = 10;
    int round = lw_snapshot(&start);
    CHECK(round >= 0);
    CHECK(state == 10);
    state += round + 1;
    /* Control leaves and comes back between the snapshot and its return. */
    for (int step = 0; step < 3; step++)
        CHECK(lwSwitch(caller, (uint64_t)(100 * round + state), NULL) == caller);
    lw_resume(start, round + 1);
    CHECK(!"resumed");
}

int main(void) {
    static int later;
    int before = make(count);
    CHECK(call(before) == 1);

    lw_snapshot_t start;
    int round = lw_snapshot(&start);
    CHECK(round >= 0);
    CHECK(later == 0);
    CHECK(call(before) == (uint64_t)(2 + 2 * round));
    if (round < 3) {
        later = make(count);
        CHECK(call(later) == 1 && call(later) == 2 && call(before) == (uint64_t)(3 + 2 * round));
        if (round == 1)
            CHECK(lwClose(before) == 0);
        lw_resume(start, round + 1);
        CHECK(!"resumed");
    }
    CHECK(lw_discard(start) == 0);

    int traveller = make(go_back);
    for (int visit = 0; visit < 4; visit++)
        for (int step = 0; step < 3; step++)
            CHECK(call(traveller) == (uint64_t)(100 * visit + 10 + visit + 1));
    CHECK(lwClose(traveller) == 0 && lwClose(before) == 0);
    CHECK_ERROR(lwSwitch(before, 0, NULL), EBADF);
    return 0;
}
