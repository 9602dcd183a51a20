/* Updates arrive in order, whole or not at all, even from a task that crashes. */
#include "check_orbit.h"
#include <pthread.h>

struct shared {
    long version;
    long cancelled;
    pthread_cond_t condition;
};

static struct shared *shared;
static long outside = 1;
static unsigned long added;
static int woken;

static unsigned long add(size_t argc, unsigned long *argv) {
    for (size_t at = 0; at < argc; at++)
        added += argv[at];
    return added;
}

static int wake(void *argument) {
    woken += *(long *)argument == 11;
    return 0;
}

static void fill(orrery_orbit_update *update, long round) {
    unsigned long arguments[] = {1, 2, (unsigned long)round};
    CHECK(orrery_orbit_update_add_data(update, &round, sizeof round) == 0);
    CHECK(orrery_orbit_update_add_modify(update, &shared->cancelled, &round, sizeof round) == 0);
    CHECK(orrery_orbit_update_add_operation(update, add, 3, arguments) == 0);
    CHECK(orrery_orbit_update_add_call(update, wake, &shared->version) == 0);
}

static long push(void *argbuf, void *store) {
    (void)store;
    orrery_orbit_update *update = orrery_orbit_update_create();
    CHECK(update);
    for (long round = 1; round <= *(long *)argbuf; round++) {
        fill(update, round);
        CHECK(orrery_orbit_push(update) == 0);
    }
    orrery_orbit_update_destroy(update);
    return shared->version;
}

static long push_and_crash(void *argbuf, void *store) {
    push(argbuf, store);
    abort();
}

static long push_nonsense(void *argbuf, void *store) {
    (void)store;
    orrery_orbit_update *update = orrery_orbit_update_create();
    unsigned long none = 0;
    fill(update, 5);
    switch (*(long *)argbuf) {
    case 0:
        orrery_orbit_update_add_modify(update, &outside, &none, sizeof none);
        break;
    case 1:
        orrery_orbit_update_add_operation(update, (orrery_orbit_operation)(void *)&outside, 0, NULL);
        break;
    default:
        orrery_orbit_update_add_call(update, (int (*)(void *))(void *)&outside, NULL);
    }
    return orrery_orbit_push(update);
}

int main(void) {
    struct orrery_area *area = orrery_area_create(4096);
    shared = orrery_area_alloc(area, sizeof *shared);
    CHECK(shared);
    shared->version = 11;
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ALWAYS;
    struct orrery_orbit *orbit = orrery_orbit_create_with("updates", push, NULL, &options);
    CHECK(orbit);

    long rounds = 3;
    struct orrery_orbit_future *future =
        orrery_orbit_call_async(orbit, 0, 1, &area, NULL, &rounds, sizeof rounds);
    orrery_orbit_update update;
    for (long round = 1; round <= 3; round++) {
        CHECK(orrery_orbit_pull(future, &update) == 1);
        const struct orrery_orbit_record *record = orrery_orbit_update_first(&update);
        CHECK(record && record->type == ORRERY_ORBIT_RECORD_DATA && record->size == 8 &&
              *(long *)record->data == round);
        record = orrery_orbit_update_next(&update, record);
        CHECK(record && record->type == ORRERY_ORBIT_RECORD_MODIFY && record->address == &shared->cancelled);
        record = orrery_orbit_update_next(&update, record);
        CHECK(record && record->type == ORRERY_ORBIT_RECORD_OPERATION && record->operation == add &&
              record->argc == 3);
        CHECK(record->argv[2] == (unsigned long)round);
        if (round == 2)
            CHECK(orrery_orbit_apply_record(&update, record) == 0);
        record = orrery_orbit_update_next(&update, record);
        CHECK(record && record->type == ORRERY_ORBIT_RECORD_OPERATION &&
              !orrery_orbit_update_next(&update, record));
        if (round == 3)
            CHECK(orrery_orbit_apply(&update) == 0);
        CHECK_FAILS(orrery_orbit_push(&update), -1, EINVAL);
        orrery_orbit_update_destroy(&update);
    }
    CHECK(orrery_orbit_pull(future, &update) == 0 && errno == 0);
    CHECK(orrery_orbit_future_get(future) == 11);
    orrery_orbit_future_destroy(future);
    CHECK(shared->cancelled == 3 && added == 5 + 6 && woken == 1);

    /* Before a crash. */
    rounds = 2;
    future = orrery_orbit_call_async(orbit, 0, 1, &area, push_and_crash, &rounds, sizeof rounds);
    CHECK(orrery_orbit_pull(future, &update) == 1 && orrery_orbit_apply(&update) == 0);
    orrery_orbit_update_destroy(&update);
    CHECK(orrery_orbit_pull(future, &update) == 1);
    orrery_orbit_update_destroy(&update);
    CHECK_FAILS(orrery_orbit_pull(future, &update), -1, ESRCH);
    CHECK(strstr(orrery_last_error(), "SIGABRT"));
    orrery_orbit_future_destroy(future);

    /* Nonsense is refused whole. */
    shared->cancelled = 99;
    for (long kind = 0; kind < 3; kind++) {
        future = orrery_orbit_call_async(orbit, 0, 1, &area, push_nonsense, &kind, sizeof kind);
        CHECK_FAILS(orrery_orbit_pull(future, &update), -1, EBADMSG);
        CHECK(orrery_orbit_pull(future, &update) == 0);
        orrery_orbit_future_destroy(future);
    }
    CHECK(shared->cancelled == 99 && outside == 1);
    CHECK(orrery_orbit_destroy(orbit) == 0);
    return 0;
}
