/*
 * An adaptive CPU share, by a PID function of target and actual CPU usage, as in "Hijack: Taking Control of COTS Systems" (West
 * and Parmer): each 10 ms it compares what the program used with what it should have, and adjusts the share that it asks for.
 *
 * Attributes are in parts per thousand of a CPU.
 */
#include <orrery/extension.h>

ORRERY_HANDLE(used)
ORRERY_HANDLE(wanted)
ORRERY_HANDLE(share)
ORRERY_HANDLE(tick)

enum {
    PERIOD = 10 * 1000 * 1000,
    SCALE = 1024,
    PROPORTIONAL = 512,
    INTEGRAL = 128,
    DERIVATIVE = 64,
    MOST = 1000
};

static int64_t sum, last;

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
    return value < low ? low : value > high ? high : value;
}

ORRERY_START { orrery_subscribe(tick(), PERIOD); }

ORRERY_EVENT(subscription, time, value, detail) {
    int64_t now, target;
    if (orrery_get_attribute(used(), &now) != ORRERY_OK ||
        orrery_get_attribute(wanted(), &target) != ORRERY_OK)
        return;
    int64_t error = target - now;
    /* Bounded, so that a long shortage is not paid back for as long afterwards. */
    sum = clamp(sum + error, -MOST * 8, MOST * 8);
    int64_t change = PROPORTIONAL * error + INTEGRAL * sum + DERIVATIVE * (error - last);
    last = error;
    int64_t next = clamp(target + change / SCALE, 1, MOST);
    /* Where the sum of all shares allows no more, halfway to the target is better than nothing. */
    if (orrery_set_attribute(share(), next) == ORRERY_GUARD)
        orrery_set_attribute(share(), target);
}
