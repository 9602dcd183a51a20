/* What cannot be is refused, and harms nothing. */
#include "check_orbit.h"
#include <sys/wait.h>

static volatile long *volatile nowhere = (volatile long *)8;
static volatile int forever = 1;

struct handles {
    struct orrery_orbit *orbit;
    struct orrery_area *area;
};

static long answer(void *argbuf, void *store) {
    (void)argbuf;
    (void)store;
    return 42;
}

static long crash(void *argbuf, void *store) {
    (void)store;
    return *(volatile long *)argbuf + *nowhere;
}

static long meddle(void *argbuf, void *store) {
    struct handles *handles = argbuf;
    (void)store;
    CHECK(orrery_orbit_inside() == 1);
    CHECK_FAILS(orrery_orbit_call(handles->orbit, 0, NULL, NULL, 0), -1, EPERM);
    CHECK_FAILS(orrery_orbit_create("inner", answer, NULL), NULL, EPERM);
    CHECK_FAILS(orrery_orbit_destroy(handles->orbit), -1, EPERM);
    CHECK_FAILS(orrery_area_alloc(handles->area, 5), NULL, EPERM);
    CHECK_FAILS(orrery_area_destroy(handles->area), -1, EPERM);
    CHECK(orrery_area_free(handles->area, handles) == 0);
    return 7;
}

static long spin(void *argbuf, void *store) {
    (void)argbuf;
    (void)store;
    while (forever) {
    }
    return 0;
}

/* Areas that cannot be, and calls that name areas which are none (any more). */
static void areas_are_checked(struct orrery_orbit *orbit) {
    struct orrery_area_options options = ORRERY_AREA_OPTIONS_INIT;
    options.capacity = (size_t)1 << 50;
    CHECK_FAILS(orrery_area_create_with(0, &options), NULL, ENOMEM);
    options.capacity = 4096;
    CHECK_FAILS(orrery_area_create_with(4097, &options), NULL, EINVAL);
    options.capacity = (size_t)1 << 20;
    options.address = (void *)12;
    CHECK_FAILS(orrery_area_create_with(0, &options), NULL, EINVAL);
    options.address = NULL;
    options.mode = 7;
    CHECK_FAILS(orrery_area_create_with(0, &options), NULL, EINVAL);

    /* Areas until there is no address space left, which is no end: the others go on. */
    options.mode = ORRERY_AREA_MODE_COPY;
    options.capacity = (size_t)1 << 30;
    static struct orrery_area *many[1024];
    size_t count = 0;
    while (count < 1024 && (many[count] = orrery_area_create_with(0, &options)))
        count++;
    CHECK(count > 0 && count < 1024 && errno == ENOMEM);
    CHECK(strstr(orrery_last_error(), "free areas") || strstr(orrery_last_error(), "arena"));
    CHECK(orrery_area_alloc(many[0], 100) && orrery_orbit_call(orbit, 1, &many[0], NULL, 0) == 42);
    for (size_t i = 0; i < count; i++)
        CHECK(orrery_area_destroy(many[i]) == 0);
    CHECK_FAILS(orrery_orbit_call(orbit, 1, &many[0], NULL, 0), -1, EINVAL);

    /* A handle of something else, and memory that never was one. */
    static char nothing[64];
    struct orrery_area *wrong[] = {(struct orrery_area *)(void *)orbit,
                                   (struct orrery_area *)(void *)nothing};
    for (size_t i = 0; i < 2; i++) {
        CHECK_FAILS(orrery_orbit_call(orbit, 1, &wrong[i], NULL, 0), -1, EINVAL);
        CHECK_FAILS(orrery_area_alloc(wrong[i], 5), NULL, EINVAL);
        CHECK_FAILS(orrery_area_destroy(wrong[i]), -1, EINVAL);
    }
    struct orrery_area *area = orrery_area_create(0);
    CHECK_FAILS(orrery_orbit_call((struct orrery_orbit *)(void *)area, 0, NULL, NULL, 0), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_destroy((struct orrery_orbit *)(void *)area), -1, EINVAL);
    CHECK(orrery_area_destroy(area) == 0);
    CHECK(orrery_orbit_call(orbit, 0, NULL, NULL, 0) == 42);
}

/* One that works, one that waits, and no room for another. */
static void a_full_queue_is_an_error(void) {
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.queue = 2;
    options.when_full = ORRERY_ORBIT_FULL_FAIL;
    struct orrery_orbit *orbit = orrery_orbit_create_with("full", answer, NULL, &options);
    struct orrery_orbit_future *one = orrery_orbit_call_async(orbit, 0, 0, NULL, spin, NULL, 0);
    struct orrery_orbit_future *two = orrery_orbit_call_async(orbit, 0, 0, NULL, NULL, NULL, 0);
    CHECK(one && two);
    CHECK_FAILS(orrery_orbit_call_async(orbit, 0, 0, NULL, NULL, NULL, 0), NULL, EAGAIN);
    CHECK_FAILS(orrery_orbit_call(orbit, 0, NULL, NULL, 0), -1, EAGAIN);
    /* Whoever waits for one that is destroyed is told. */
    CHECK(orrery_orbit_destroy(orbit) == 0);
    CHECK_FAILS(orrery_orbit_future_get(one), -1, ESRCH);
    CHECK_FAILS(orrery_orbit_future_get(two), -1, ESRCH);
    orrery_orbit_future_destroy(one);
    orrery_orbit_future_destroy(two);
}

int main(void) {
    char text[2000] = "";
    struct orrery_area *area = orrery_area_create(0);
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.time_limit_ms = 100;
    struct orrery_orbit *orbit = orrery_orbit_create_with("errors", answer, NULL, &options);
    CHECK(area && orbit);

    CHECK_FAILS(orrery_orbit_create(NULL, answer, NULL), NULL, EINVAL);
    CHECK_FAILS(orrery_orbit_create("", answer, NULL), NULL, EINVAL);
    CHECK_FAILS(orrery_orbit_create("data", (orrery_orbit_entry)(void *)text, NULL), NULL, EINVAL);
    options.restart = 9;
    CHECK_FAILS(orrery_orbit_create_with("policy", answer, NULL, &options), NULL, EINVAL);
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.reaper = ORRERY_ORBIT_REAP_PROGRAM;
    CHECK_FAILS(orrery_orbit_create_with("reaper", answer, NULL, &options), NULL, EINVAL);
    options.size = 5000;
    CHECK_FAILS(orrery_orbit_create_with("size", answer, NULL, &options), NULL, E2BIG);

    CHECK_FAILS(orrery_orbit_call(NULL, 0, NULL, NULL, 0), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_call(orbit, 1, NULL, NULL, 0), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_call(orbit, 0, NULL, NULL, 8), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_call(orbit, 0, NULL, text, 1024), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_call_async(orbit, 64, 0, NULL, NULL, NULL, 0), NULL, EINVAL);
    CHECK_FAILS(orrery_orbit_call_function(orbit, 0, NULL, (orrery_orbit_entry)(void *)text, NULL, 0), -1,
                EINVAL);
    struct orrery_area *none = NULL;
    CHECK_FAILS(orrery_orbit_call(orbit, 1, &none, NULL, 0), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_future_get(NULL), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_update_create(), NULL, EPERM);
    CHECK(orrery_orbit_call(orbit, 0, NULL, text, 1023) == 42);

    areas_are_checked(orbit);
    a_full_queue_is_an_error();

    /* Crashes and loops end the orbit, not the program; it comes back. */
    CHECK_FAILS(orrery_orbit_call_function(orbit, 0, NULL, crash, text, 8), -1, ESRCH);
    CHECK(strstr(orrery_last_error(), "SIGSEGV") && strstr(orrery_last_error(), "0x8"));
    CHECK(orrery_orbit_call(orbit, 0, NULL, NULL, 0) == 42 && orrery_orbit_restarts(orbit) == 1);
    struct handles handles = {orbit, area};
    CHECK_FAILS(orrery_orbit_call_function(orbit, 0, NULL, spin, NULL, 0), -1, ESRCH);
    CHECK(strstr(orrery_last_error(), "100ms"));
    CHECK(orrery_orbit_call(orbit, 0, NULL, NULL, 0) == 42);
    CHECK(orrery_orbit_call_function(orbit, 1, &area, meddle, &handles, sizeof handles) == 7);

    /* A forked child has none of its parent's orbits. */
    pid_t child = fork();
    if (child == 0) {
        CHECK_FAILS(orrery_orbit_call(orbit, 0, NULL, NULL, 0), -1, ECHILD);
        CHECK_FAILS(orrery_orbit_destroy(orbit), -1, ECHILD);
        struct orrery_orbit *own = orrery_orbit_create("own", answer, NULL);
        CHECK(own && orrery_orbit_call(own, 1, &area, NULL, 0) == 42);
        _exit(3);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 3);
    CHECK(orrery_orbit_call(orbit, 0, NULL, NULL, 0) == 42);

    /* Without a policy a dead orbit stays dead, and the program may reap it. */
    struct orrery_orbit_options mortal = ORRERY_ORBIT_OPTIONS_INIT;
    mortal.reaper = ORRERY_ORBIT_REAP_PROGRAM;
    struct orrery_orbit *dead = orrery_orbit_create_with("dead", crash, NULL, &mortal);
    int pid = orrery_orbit_pid(dead);
    CHECK_FAILS(orrery_orbit_call(dead, 0, NULL, text, 8), -1, ESRCH);
    CHECK_FAILS(orrery_orbit_call(dead, 0, NULL, text, 8), -1, EINVAL);
    CHECK(orrery_orbit_alive(dead) == 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    CHECK(orrery_orbit_destroy(dead) == 0);

    CHECK(orrery_orbit_destroy(orbit) == 0);
    CHECK_FAILS(orrery_orbit_destroy(orbit), -1, EINVAL);
    CHECK_FAILS(orrery_orbit_call(orbit, 0, NULL, NULL, 0), -1, EINVAL);
    CHECK(orrery_area_destroy(area) == 0);
    CHECK_FAILS(orrery_area_destroy(area), -1, EINVAL);
    CHECK_FAILS(orrery_area_alloc(area, 8), NULL, EINVAL);
    CHECK_FAILS(orrery_area_destroy(NULL), -1, EINVAL);
    return 0;
}
