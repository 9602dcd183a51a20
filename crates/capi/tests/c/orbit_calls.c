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
    struct orbit_area *area = orbit_area_create(4096);
    struct orbit *orbit = orbit_create("sum", sum, NULL);
    CHECK(area && orbit);
    CHECK(orbit_pid(orbit) > 0 && orbit_pid(orbit) != getpid() && orbit_alive(orbit) == 1);
    CHECK(orbit_inside() == 0);

    struct list *first = NULL;
    for (long value = 1; value <= 1000; value++) {
        struct list *one = orbit_alloc(area, sizeof *one);
        CHECK(one && one->value == 0 && orbit_area_contains(area, one) == 1);
        one->value = value;
        one->next = first;
        first = one;
    }
    struct argument argument = {first, 2};
    CHECK(orbit_call(orbit, 1, &area, &argument, sizeof argument) == 2 * 500500 && errno == 0);
    CHECK(first->value == 1000);
    first->value = 0;
    CHECK(orbit_call(orbit, 1, &area, &argument, sizeof argument) == 2 * 499500);

    /* Each of the queued calls sees its own moment. */
    struct orbit_future *futures[10];
    for (long round = 0; round < 10; round++) {
        first->value = round;
        futures[round] = orbit_call_async(orbit, 0, 1, &area, sleep_and_sum, &argument, sizeof argument);
        CHECK(futures[round]);
    }
    first->value = 77;
    long value = 0;
    CHECK_FAILS(orbit_future_wait(futures[9], 1, &value), -1, ETIMEDOUT);
    for (long round = 9; round >= 0; round--) {
        CHECK(orbit_future_get(futures[round]) == 2 * (499500 + round));
        CHECK(orbit_future_wait(futures[round], 1000, &value) == 0 && value == 2 * (499500 + round));
        orbit_future_free(futures[round]);
    }

    /* A call that waits can be cancelled; one that is skipped says so. */
    struct orbit_future *running =
        orbit_call_async(orbit, ORBIT_CANCELLABLE, 1, &area, sleep_and_sum, &argument, sizeof argument);
    struct orbit_future *waiting =
        orbit_call_async(orbit, ORBIT_CANCELLABLE, 1, &area, NULL, &argument, sizeof argument);
    CHECK(running && waiting);
    CHECK_FAILS(orbit_call_async(orbit, ORBIT_SKIP_SAME_ARGUMENT, 1, &area, NULL, &argument, sizeof argument),
                NULL, EALREADY);
    CHECK(orbit_future_cancel(waiting) == 1);
    CHECK_FAILS(orbit_future_get(waiting), -1, ECANCELED);
    CHECK(orbit_future_get(running) == 2 * 499577);
    orbit_future_free(running);
    orbit_future_free(waiting);
    errno = 1;
    CHECK(!orbit_call_async(orbit, ORBIT_NO_RETURN_VALUE, 1, &area, NULL, &argument, sizeof argument));
    CHECK(errno == 0);

    /* Memory of other shapes. */
    char *text = orbit_alloc_aligned(area, 4096, 10);
    CHECK(text && (size_t)text % 4096 == 0);
    strcpy(text, "something");
    text = orbit_realloc(area, text, 100000);
    CHECK(text && strcmp(text, "something") == 0 && text[99999] == 0 && (size_t)text % 4096 == 0);
    CHECK(orbit_free(area, text) == 0);
    CHECK_FAILS(orbit_free(area, text), -1, EINVAL);
    CHECK_FAILS(orbit_free(area, first->next + 1), -1, EINVAL);
    CHECK_FAILS(orbit_free(area, &argument), -1, EINVAL);
    CHECK_FAILS(orbit_realloc(area, &argument, 5), NULL, EINVAL);
    CHECK_FAILS(orbit_alloc_aligned(area, 3, 5), NULL, EINVAL);
    CHECK_FAILS(orbit_alloc(area, (size_t)-1), NULL, ENOMEM);
    CHECK_FAILS(orbit_alloc(area, (size_t)1 << 45), NULL, ENOMEM);

    /* Memory that the program lays out itself. */
    struct orbit_area_options wanted = ORBIT_AREA_OPTIONS_INIT;
    wanted.mode = ORBIT_MODE_COPY;
    wanted.capacity = 1 << 20;
    struct orbit_area *raw = orbit_area_create_with(8192, &wanted);
    CHECK(raw);
    struct list *only = orbit_area_base(raw);
    only->value = 31;
    CHECK(orbit_area_use(raw, sizeof *only) == 0 && orbit_area_used(raw) == sizeof *only);
    CHECK_FAILS(orbit_alloc(raw, 5), NULL, EINVAL);
    struct orbit_area *both[] = {raw, area};
    struct argument other = {only, 1};
    CHECK(orbit_call(orbit, 2, both, &other, sizeof other) == 31);

    /* The store, and what main had at the creation. */
    at_creation = 7;
    struct orbit *counter = orbit_create("counter", count, make_store);
    at_creation = 9;
    CHECK(orbit_call(counter, 0, NULL, NULL, 0) == 108 && orbit_call(counter, 0, NULL, NULL, 0) == 109);

    CHECK(orbit_destroy(counter) == 0 && orbit_destroy(orbit) == 0 && orbit_area_destroy(raw) == 0);
    CHECK(orbit_area_destroy(area) == 0);
    return 0;
}
