/* Figure 4 of the paper on orbits, by the paper's own names. */
#include "check_orbit.h"

#include <string.h>

#include <orrery/compat/orbit.h>

struct table {
    long sum;
    long rows[8];
};

struct check_args {
    struct table *table;
};

/* Sums the rows, and has main's table changed where they do not add up. */
static long check(void *argbuf, void *store) {
    struct table *table = ((struct check_args *)argbuf)->table;
    long sum = 0;
    CHECK(!strcmp((const char *)store, "store"));
    for (int i = 0; i < 8; i++)
        sum += table->rows[i];
    if (sum != table->sum) {
        orbit_update *update = orbit_update_create();
        CHECK(update && orbit_update_add_modify(update, &table->sum, &sum, sizeof sum) == 0);
        CHECK(orbit_push(update) == 0);
        orbit_update_free(update);
        return 1;
    }
    return 0;
}

static void *init(void) { return (void *)"store"; }

int main(void) {
    struct orbit_area *area = orbit_area_create(4096);
    struct orbit_options options = ORBIT_OPTIONS_INIT;
    options.restart = ORBIT_RESTART_ON_CRASH;
    struct orbit *checker = orbit_create_with("checker", check, init, &options);
    CHECK(area && checker && orbit_pid(checker) > 0);
    struct table *table = (struct table *)orbit_alloc(area, sizeof *table);
    CHECK(table && orbit_area_contains(area, table));
    struct check_args args = {table};
    CHECK(orbit_call(checker, 1, &area, &args, sizeof args) == 0);

    for (int i = 0; i < 8; i++)
        table->rows[i] = i;
    struct orbit_future *future = orbit_call_async(checker, 0, 1, &area, NULL, &args, sizeof args);
    CHECK(future);
    orbit_update update;
    CHECK(pull_orbit(future, &update) == 1 && table->sum == 0);
    CHECK(orbit_apply(&update) == 0 && table->sum == 28);
    orbit_update_free(&update);
    CHECK(pull_orbit(future, &update) == 0 && orbit_future_get(future) == 1);
    orbit_future_free(future);

    CHECK(orbit_free(area, table) == 0 && orbit_destroy(checker) == 0 && orbit_area_destroy(area) == 0);
    return 0;
}
