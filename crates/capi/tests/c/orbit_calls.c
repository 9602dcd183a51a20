/* Calls of every kind see the areas as of the call. */
#include "check_orbit.h"

struct list {
    long value;
    struct list *next;
};

struct argument {
    struct list *list;
    long times;
};

static int at_creation = 5;

static long sum(void *argbuf, void *store) {
    struct argument *argument = argbuf;
    long total = 0;
    (void)store;
    for (struct list *at = argument->list; at; at = at->next) {
        total += at->value;
        at->value = -1; /* the orbit's own copy */
    }
    return total * argument->times;
}

static long sleep_and_sum(void *argbuf, void *store) {
    usleep(20000);
    return sum(argbuf, store);
}

static void *make_store(void) {
    long *calls = malloc(sizeof *calls);
    *calls = 100;
    return calls;
}

static long count(void *argbuf, void *store) {
    (void)argbuf;
    return ++*(long *)store + at_creation;
}

int main(void) {
    struct orrery_area *area = orrery_area_create(4096);
    struct orrery_orbit *orbit = orrery_orbit_create("sum", sum, NULL);
    CHECK(area && orbit);
    CHECK(orrery_orbit_pid(orbit) > 0 && orrery_orbit_pid(orbit) != getpid() &&
          orrery_orbit_alive(orbit) == 1);
    CHECK(orrery_orbit_inside() == 0);

    struct list *first = NULL;
    for (long value = 1; value <= 1000; value++) {
        struct list *one = orrery_area_alloc(area, sizeof *one);
        CHECK(one && one->value == 0 && orrery_area_contains(area, one) == 1);
        one->value = value;
        one->next = first;
        first = one;
    }
    struct argument argument = {first, 2};
    CHECK(orrery_orbit_call(orbit, 1, &area, &argument, sizeof argument) == 2 * 500500 && errno == 0);
    CHECK(first->value == 1000);
    first->value = 0;
    CHECK(orrery_orbit_call(orbit, 1, &area, &argument, sizeof argument) == 2 * 499500);

    /* Each of the queued calls sees its own moment. */
    struct orrery_orbit_future *futures[10];
    for (long round = 0; round < 10; round++) {
        first->value = round;
        futures[round] =
            orrery_orbit_call_async(orbit, 0, 1, &area, sleep_and_sum, &argument, sizeof argument);
        CHECK(futures[round]);
    }
    first->value = 77;
    long value = 0;
    CHECK_FAILS(orrery_orbit_future_wait(futures[9], 1, &value), -1, ETIMEDOUT);
    for (long round = 9; round >= 0; round--) {
        CHECK(orrery_orbit_future_get(futures[round]) == 2 * (499500 + round));
        CHECK(orrery_orbit_future_wait(futures[round], 1000, &value) == 0 && value == 2 * (499500 + round));
        orrery_orbit_future_destroy(futures[round]);
    }

    /* A call that waits can be cancelled; one that is skipped says so. */
    struct orrery_orbit_future *running = orrery_orbit_call_async(orbit, ORRERY_ORBIT_CANCELLABLE, 1, &area,
                                                                  sleep_and_sum, &argument, sizeof argument);
    struct orrery_orbit_future *waiting =
        orrery_orbit_call_async(orbit, ORRERY_ORBIT_CANCELLABLE, 1, &area, NULL, &argument, sizeof argument);
    CHECK(running && waiting);
    CHECK_FAILS(orrery_orbit_call_async(orbit, ORRERY_ORBIT_SKIP_SAME_ARGUMENT, 1, &area, NULL, &argument,
                                        sizeof argument),
                NULL, EALREADY);
    CHECK(orrery_orbit_future_cancel(waiting) == 1);
    CHECK_FAILS(orrery_orbit_future_get(waiting), -1, ECANCELED);
    CHECK(orrery_orbit_future_get(running) == 2 * 499577);
    orrery_orbit_future_destroy(running);
    orrery_orbit_future_destroy(waiting);
    errno = 1;
    CHECK(!orrery_orbit_call_async(orbit, ORRERY_ORBIT_NO_RETURN_VALUE, 1, &area, NULL, &argument,
                                   sizeof argument));
    CHECK(errno == 0);

    /* Memory of other shapes. */
    char *text = orrery_area_alloc_aligned(area, 4096, 10);
    CHECK(text && (size_t)text % 4096 == 0);
    strcpy(text, "something");
    text = orrery_area_realloc(area, text, 100000);
    CHECK(text && strcmp(text, "something") == 0 && text[99999] == 0 && (size_t)text % 4096 == 0);
    CHECK(orrery_area_free(area, text) == 0);
    CHECK_FAILS(orrery_area_free(area, text), -1, EINVAL);
    CHECK_FAILS(orrery_area_free(area, first->next + 1), -1, EINVAL);
    CHECK_FAILS(orrery_area_free(area, &argument), -1, EINVAL);
    CHECK_FAILS(orrery_area_realloc(area, &argument, 5), NULL, EINVAL);
    CHECK_FAILS(orrery_area_alloc_aligned(area, 3, 5), NULL, EINVAL);
    CHECK_FAILS(orrery_area_alloc(area, (size_t)-1), NULL, ENOMEM);
    CHECK_FAILS(orrery_area_alloc(area, (size_t)1 << 45), NULL, ENOMEM);

    /* Memory that the program lays out itself. */
    struct orrery_area_options wanted = ORRERY_AREA_OPTIONS_INIT;
    wanted.mode = ORRERY_AREA_MODE_COPY;
    wanted.capacity = 1 << 20;
    struct orrery_area *raw = orrery_area_create_with(8192, &wanted);
    CHECK(raw);
    struct list *only = orrery_area_base(raw);
    only->value = 31;
    CHECK(orrery_area_use(raw, sizeof *only) == 0 && orrery_area_used(raw) == sizeof *only);
    CHECK_FAILS(orrery_area_alloc(raw, 5), NULL, EINVAL);
    struct orrery_area *both[] = {raw, area};
    struct argument other = {only, 1};
    CHECK(orrery_orbit_call(orbit, 2, both, &other, sizeof other) == 31);

    /* The store, and what main had at the creation. */
    at_creation = 7;
    struct orrery_orbit *counter = orrery_orbit_create("counter", count, make_store);
    at_creation = 9;
    CHECK(orrery_orbit_call(counter, 0, NULL, NULL, 0) == 108 &&
          orrery_orbit_call(counter, 0, NULL, NULL, 0) == 109);

    CHECK(orrery_orbit_destroy(counter) == 0 && orrery_orbit_destroy(orbit) == 0 &&
          orrery_area_destroy(raw) == 0);
    CHECK(orrery_area_destroy(area) == 0);
    return 0;
}
