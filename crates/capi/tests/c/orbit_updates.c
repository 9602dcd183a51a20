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

static void fill(orbit_update *update, long round) {
    unsigned long arguments[] = {1, 2, (unsigned long)round};
    CHECK(orbit_update_add_data(update, &round, sizeof round) == 0);
    CHECK(orbit_update_add_modify(update, &shared->cancelled, &round, sizeof round) == 0);
    CHECK(orbit_update_add_operation(update, add, 3, arguments) == 0);
    CHECK(orbit_update_add_call(update, wake, &shared->version) == 0);
}

static long push(void *argbuf, void *store) {
    (void)store;
    orbit_update *update = orbit_update_create();
    CHECK(update);
    for (long round = 1; round <= *(long *)argbuf; round++) {
        fill(update, round);
        CHECK(orbit_push(update) == 0);
    }
    orbit_update_free(update);
    return shared->version;
}

static long push_and_crash(void *argbuf, void *store) {
    push(argbuf, store);
    abort();
}

static long push_nonsense(void *argbuf, void *store) {
    (void)store;
    orbit_update *update = orbit_update_create();
    unsigned long none = 0;
    fill(update, 5);
    switch (*(long *)argbuf) {
    case 0:
        orbit_update_add_modify(update, &outside, &none, sizeof none);
        break;
    case 1:
        orbit_update_add_operation(update, (orbit_operation)(void *)&outside, 0, NULL);
        break;
    default:
        orbit_update_add_call(update, (int (*)(void *))(void *)&outside, NULL);
    }
    return orbit_push(update);
}

int main(void) {
    struct orbit_area *area = orbit_area_create(4096);
    shared = orbit_alloc(area, sizeof *shared);
    CHECK(shared);
    shared->version = 11;
    struct orbit_options options = ORBIT_OPTIONS_INIT;
    options.restart = ORBIT_RESTART_ALWAYS;
    struct orbit *orbit = orbit_create_with("updates", push, NULL, &options);
    CHECK(orbit);

    long rounds = 3;
    struct orbit_future *future = orbit_call_async(orbit, 0, 1, &area, NULL, &rounds, sizeof rounds);
    orbit_update update;
    for (long round = 1; round <= 3; round++) {
        CHECK(pull_orbit(future, &update) == 1);
        const struct orbit_record *record = orbit_update_first(&update);
        CHECK(record && record->type == ORBIT_RECORD_DATA && record->size == 8 &&
              *(long *)record->data == round);
        record = orbit_update_next(&update, record);
        CHECK(record && record->type == ORBIT_RECORD_MODIFY && record->address == &shared->cancelled);
        record = orbit_update_next(&update, record);
        CHECK(record && record->type == ORBIT_RECORD_OPERATION && record->operation == add &&
              record->argc == 3);
        CHECK(record->argv[2] == (unsigned long)round);
        if (round == 2)
            CHECK(orbit_apply_record(&update, record) == 0);
        record = orbit_update_next(&update, record);
        CHECK(record && record->type == ORBIT_RECORD_OPERATION && !orbit_update_next(&update, record));
        if (round == 3)
            CHECK(orbit_apply(&update) == 0);
        CHECK_FAILS(orbit_push(&update), -1, EINVAL);
        orbit_update_free(&update);
    }
    CHECK(pull_orbit(future, &update) == 0 && errno == 0);
    CHECK(orbit_future_get(future) == 11);
    orbit_future_free(future);
    CHECK(shared->cancelled == 3 && added == 5 + 6 && woken == 1);

    /* Before a crash. */
    rounds = 2;
    future = orbit_call_async(orbit, 0, 1, &area, push_and_crash, &rounds, sizeof rounds);
    CHECK(pull_orbit(future, &update) == 1 && orbit_apply(&update) == 0);
    orbit_update_free(&update);
    CHECK(pull_orbit(future, &update) == 1);
    orbit_update_free(&update);
    CHECK_FAILS(pull_orbit(future, &update), -1, ESRCH);
    CHECK(strstr(orbit_error(), "SIGABRT"));
    orbit_future_free(future);

    /* Nonsense is refused whole. */
    shared->cancelled = 99;
    for (long kind = 0; kind < 3; kind++) {
        future = orbit_call_async(orbit, 0, 1, &area, push_nonsense, &kind, sizeof kind);
        CHECK_FAILS(pull_orbit(future, &update), -1, EBADMSG);
        CHECK(pull_orbit(future, &update) == 0);
        orbit_future_free(future);
    }
    CHECK(shared->cancelled == 99 && outside == 1);
    CHECK(orbit_destroy(orbit) == 0);
    return 0;
}
