/*
 * A monitor of a program's I/O that throttles it: a token bucket, filled each period, emptied by the bytes of each event. Where
 * it is empty, the program's weight is reduced until it has tokens again.
 *
 * Each event of the source `call` is a system call that the program's policy logs: its value is the call's result, which for reads and
 * writes is a number of bytes.
 */
#include <orrery/extension.h>

ORRERY_HANDLE(io)
ORRERY_HANDLE(tick)
ORRERY_HANDLE(weight)
ORRERY_HANDLE(owner)

enum { PERIOD = 10 * 1000 * 1000, FILL = 64 << 10, MOST = 256 << 10, NORMAL = 100, THROTTLED = 1 };

static int32_t ticks;
static int64_t tokens = MOST;
static int throttled;

ORRERY_START {
    ticks = orrery_subscribe(tick(), PERIOD);
    orrery_subscribe(io(), 0);
}

static void throttle(int on, int64_t time) {
    if (on == throttled || orrery_set_attribute(weight(), on ? THROTTLED : NORMAL) != ORRERY_OK)
        return;
    throttled = on;
    struct {
        int64_t time;
        int64_t throttled;
    } message = {time, on};
    orrery_emit(owner(), &message, sizeof message);
}

ORRERY_EVENT(subscription, time, value, detail) {
    if (subscription == ticks) {
        tokens = tokens + FILL > MOST ? MOST : tokens + FILL;
        if (tokens > MOST / 2)
            throttle(0, time);
    } else {
        tokens -= value > 0 ? value : 0;
        if (tokens < 0)
            throttle(1, time);
    }
}
