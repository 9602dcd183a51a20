/* How restarts follow one another is the program's choice. */
#include "check_orbit.h"
#include <time.h>

static volatile long *volatile nowhere = (volatile long *)8;

static long obey(void *argbuf, void *store) {
    (void)store;
    if (*(int *)argbuf)
        return *nowhere;
    return 42;
}

static long ask(struct orrery_orbit *orbit, int crash) {
    return orrery_orbit_call(orbit, 0, NULL, &crash, sizeof crash);
}

static void sleep_ms(long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&time, NULL);
}

static long milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static struct orrery_orbit *create(unsigned limit, unsigned first, unsigned longest, unsigned healthy) {
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.restart_limit = limit;
    options.backoff_first_ms = first;
    options.backoff_longest_ms = longest;
    options.healthy_after_ms = healthy;
    return orrery_orbit_create_with("restarts", obey, NULL, &options);
}

/* After so many restarts in a row it stays dead. */
static void a_limit_is_kept(void) {
    struct orrery_orbit *orbit = create(2, 1, 1, 3600 * 1000);
    CHECK(orbit);
    for (int i = 0; i < 2; i++) {
        CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
        CHECK(ask(orbit, 0) == 42);
    }
    CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
    CHECK_FAILS(ask(orbit, 0), -1, EINVAL);
    CHECK(orrery_orbit_restarts(orbit) == 2 && orrery_orbit_alive(orbit) == 0);
    CHECK(orrery_orbit_destroy(orbit) == 0);
}

/* One that lived long enough may crash as often again. */
static void health_is_rewarded(void) {
    struct orrery_orbit *orbit = create(1, 1, 1, 50);
    CHECK(orbit);
    for (int i = 0; i < 5; i++) {
        sleep_ms(60);
        CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
        CHECK(ask(orbit, 0) == 42);
    }
    CHECK(orrery_orbit_restarts(orbit) == 5);
    CHECK(orrery_orbit_destroy(orbit) == 0);
}

/* More than the usual ten, where nothing limits them. */
static void without_a_limit_it_always_comes_back(void) {
    struct orrery_orbit *orbit = create(ORRERY_ORBIT_RESTART_WITHOUT_LIMIT, 1, 1, 3600 * 1000);
    CHECK(orbit);
    for (int i = 0; i < 13; i++) {
        CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
        CHECK(ask(orbit, 0) == 42);
    }
    CHECK(orrery_orbit_restarts(orbit) == 13);
    CHECK(orrery_orbit_destroy(orbit) == 0);
}

/* The first restart comes at once, the second not before the wait is over. */
static void a_wait_is_kept(void) {
    struct orrery_orbit *orbit = create(0, 300, 0, 3600 * 1000);
    CHECK(orbit);
    CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
    CHECK(ask(orbit, 0) == 42);
    long begin = milliseconds();
    CHECK_FAILS(ask(orbit, 1), -1, ESRCH);
    CHECK(ask(orbit, 0) == 42);
    CHECK(milliseconds() - begin >= 299);
    CHECK(orrery_orbit_destroy(orbit) == 0);
}

static void nonsense_is_refused(void) {
    CHECK_FAILS(create(1, 200, 100, 0), NULL, EINVAL);
    CHECK(strstr(orrery_last_error(), "backoff_first_ms"));
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart_limit = 3;
    CHECK_FAILS(orrery_orbit_create_with("never", obey, NULL, &options), NULL, EINVAL);
    CHECK(strstr(orrery_last_error(), "restart_limit"));
    /* A program that was built before there were these options. */
    options.size = offsetof(struct orrery_orbit_options, restart_limit);
    struct orrery_orbit *older = orrery_orbit_create_with("older", obey, NULL, &options);
    CHECK(older && ask(older, 0) == 42);
    CHECK(orrery_orbit_destroy(older) == 0);
}

int main(void) {
    a_limit_is_kept();
    health_is_rewarded();
    without_a_limit_it_always_comes_back();
    a_wait_is_kept();
    nonsense_is_refused();
    return 0;
}
