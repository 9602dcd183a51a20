#include "orbits.h"

#include "dump.h"
#include "expiry.h"
#include "settings.h"
#include "slowlog.h"
#include "watchdog.h"

static struct auxiliary *const all[] = {&slowlog, &dump, &expiry, &watchdog};

#define COUNT (sizeof all / sizeof *all)

struct auxiliary *orbits_at(size_t index) {
    return index < COUNT ? all[index] : NULL;
}

void orbits_create(void) {
    for (size_t i = 0; i < COUNT; i++)
        all[i]->create();
}

bool orbits_busy(void) {
    bool busy = dump_is_running();
    for (size_t i = 0; i < COUNT; i++)
        busy = busy || all[i]->companion.under_way > 0;
    return busy;
}

void orbits_glance(void) {
    for (size_t i = 0; i < COUNT; i++)
        companion_glance(&all[i]->companion);
    dump_glance();
}

void orbits_tick(void) {
    for (size_t i = 0; i < COUNT; i++) {
        /* Asking after one that died restarts it when that is due. */
        if (all[i]->companion.orbit)
            orrery_orbit_alive(all[i]->companion.orbit);
        if (all[i]->tick)
            all[i]->tick();
    }
}

void orbits_destroy(void) {
    for (size_t i = 0; i < COUNT; i++)
        companion_destroy(&all[i]->companion);
}
