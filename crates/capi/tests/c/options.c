/* Structures of options of older programs, of newer ones, and of no program. */
#include "check_orbit.h"

#include <string.h>

#include <orrery/session.h>

static long answer(void *argbuf, void *store) {
    (void)argbuf, (void)store;
    return 42;
}

static void serve(int connection, void *with) { (void)connection, (void)with; }

/* A header that is newer than the library has more members. */
struct newer_orbit_options {
    struct orrery_orbit_options known;
    unsigned long member;
};
struct newer_area_options {
    struct orrery_area_options known;
    unsigned long member;
};
struct newer_session_options {
    struct orrery_session_options known;
    unsigned long member;
};

static struct orrery_orbit *orbit_with(const void *options) {
    return orrery_orbit_create_with("options", answer, NULL, (const struct orrery_orbit_options *)options);
}

static void orbits(void) {
    struct newer_orbit_options options;
    memset(&options, 0, sizeof options);

    /* Older: it knows the size and the restart policy; what is behind them is not read. */
    options.known.size = offsetof(struct orrery_orbit_options, when_full);
    options.known.when_full = 99;
    struct orrery_orbit *orbit = orbit_with(&options);
    CHECK(orbit && orrery_orbit_call(orbit, 0, NULL, NULL, 0) == 42);
    CHECK(orrery_orbit_destroy(orbit) == 0);

    /* Newer, with a member that is not set, and then set. */
    options.known.when_full = 0;
    options.known.size = sizeof options;
    orbit = orbit_with(&options);
    CHECK(orbit && orrery_orbit_destroy(orbit) == 0);
    options.member = 1ul << 63;
    errno = 0;
    CHECK(!orbit_with(&options) && errno == E2BIG && strstr(orrery_last_error(), "does not know"));

    /* None. */
    options.known.size = sizeof(size_t) - 1;
    errno = 0;
    CHECK(!orbit_with(&options) && errno == EINVAL && strstr(orrery_last_error(), "OPTIONS_INIT"));
    options.known.size = (size_t)-1;
    errno = 0;
    CHECK(!orbit_with(&options) && errno == E2BIG);
}

static void areas(void) {
    struct newer_area_options options;
    memset(&options, 0, sizeof options);
    options.known.size = offsetof(struct orrery_area_options, capacity);
    options.known.capacity = 1;
    struct orrery_area *area = orrery_area_create_with(4096, &options.known);
    CHECK(area && orrery_area_destroy(area) == 0);
    options.known.capacity = 0;
    options.known.size = sizeof options;
    area = orrery_area_create_with(4096, &options.known);
    CHECK(area && orrery_area_destroy(area) == 0);
    options.member = 1;
    errno = 0;
    CHECK(!orrery_area_create_with(4096, &options.known) && errno == E2BIG);
}

static void sessions(void) {
    struct newer_session_options options;
    memset(&options, 0, sizeof options);
    errno = 0;
    CHECK(!orrery_session_pool_create(&options.known, serve, NULL) && errno == EINVAL);
    options.known.size = sizeof options;
    options.member = 1;
    errno = 0;
    CHECK(!orrery_session_pool_create(&options.known, serve, NULL) && errno == E2BIG);
    options.member = 0;
    options.known.initial = 1;
    struct orrery_session_pool *pool = orrery_session_pool_create(&options.known, serve, NULL);
    CHECK(pool);
    orrery_session_pool_destroy(pool);
    options.known.size = offsetof(struct orrery_session_options, fds);
    options.known.fd_count = 7;
    pool = orrery_session_pool_create(&options.known, serve, NULL);
    CHECK(pool);
    orrery_session_pool_destroy(pool);
}

int main(void) {
    orbits();
    areas();
    sessions();
    return 0;
}
