/* Chooses a program's quality by the CPU time that it uses, and tells the program. */
#include <orrery/extension.h>

ORRERY_HANDLE(used)
ORRERY_HANDLE(quality)
ORRERY_HANDLE(tick)

ORRERY_START { orrery_subscribe(tick(), 50 * 1000 * 1000); }

ORRERY_EVENT(subscription, time, value, detail) {
    struct {
        unsigned int number;
        unsigned int value[2];
    } message = {1, {3, 0}};
    int64_t now;
    if (orrery_get_attribute(used(), &now) == ORRERY_OK && now > 20 * 1000 * 1000)
        message.value[0] = 1;
    orrery_emit(quality(), &message, sizeof message);
}
