/*
 * Orrery: extensions of a service manager, in C.
 *
 *     #include <orrery/extension.h>
 *
 *     ORRERY_HANDLE(used)
 *     ORRERY_HANDLE(target)
 *     ORRERY_HANDLE(tick)
 *
 *     ORRERY_START {
 *         orrery_subscribe(tick(), 10 * 1000 * 1000);
 *     }
 *
 *     ORRERY_EVENT(subscription, time, value, detail) {
 *         int64_t used_now;
 *         if (orrery_get_attribute(used(), &used_now) == ORRERY_OK && used_now < 40)
 *             orrery_set_attribute(target(), 50);
 *     }
 *
 * An extension is a WebAssembly module that runs inside the manager, whether or not its owner runs. It is compiled without a C
 * library:
 *
 *     clang --target=wasm32 -O2 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=16384 -o shares.wasm shares.c
 *
 * A handle stands for a right that the extension's manifest asks for, by its name there, and that the manager granted. A number
 * that was never granted, an address outside the module's memory, or more operations, CPU time or memory than the manifest
 * reserves end the run: it is aborted, counted, the owner is notified, and the module starts over with new memory.
 *
 * Functions return ORRERY_OK or a number >= 0, or one of the negative codes below; nothing is changed then.
 */
#ifndef ORRERY_EXTENSION_H
#define ORRERY_EXTENSION_H

#ifndef __wasm__
#error "extensions are compiled with clang --target=wasm32"
#endif

#include <stddef.h>
#include <stdint.h>

/* Done. */
#define ORRERY_OK 0
/* The handle does not have this right. */
#define ORRERY_DENIED (-1)
/* The value is outside the attribute's range. */
#define ORRERY_RANGE (-2)
/* A guard refuses the value: a sum, or the service of another program, would suffer. */
#define ORRERY_GUARD (-3)
/* The handle was revoked, or what it stands for does not exist any more. */
#define ORRERY_GONE (-4)
/* There is no more room: 64 subscriptions, 16 messages of one event, or a full queue at the receiver. */
#define ORRERY_LIMIT (-5)
/* What the handle stands for has no such operation, or an argument is invalid. */
#define ORRERY_INVALID (-6)

/* The longest message in bytes. */
#define ORRERY_MESSAGE 256

/* A handle. It is not a pointer, and not a small number. */
typedef int32_t orrery_handle;

#define ORRERY_IMPORT_(module, name) __attribute__((import_module(module), import_name(name)))

/* Declares the function name(), which returns the handle that the manifest has under this name. */
#define ORRERY_HANDLE(name) ORRERY_HANDLE_AS(name, #name)

/* The same for a name that is no identifier of C. */
#define ORRERY_HANDLE_AS(function, name)                                                                     \
    ORRERY_IMPORT_("handle", name)                                                                           \
    orrery_handle function(void);

/* Begins the function that is called once before the first event, and again after a run was aborted. */
#define ORRERY_START __attribute__((export_name("start"))) void orrery_start_(void)

/*
 * Begins the function that is called for each event: with the number of the subscription, the time in nanoseconds of
 * orrery_clock, and two numbers that the event source defines.
 */
#define ORRERY_EVENT(subscription, time, value, detail)                                                      \
    __attribute__((export_name("event"))) void orrery_event_(                                                \
        int32_t subscription __attribute__((unused)), int64_t time __attribute__((unused)),                  \
        int64_t value __attribute__((unused)), int64_t detail __attribute__((unused)))

/* Writes the value of an attribute to *value. Right: get. */
ORRERY_IMPORT_("orrery", "get_attribute") int32_t orrery_get_attribute(orrery_handle of, int64_t *value);

/* Sets an attribute, if the guards of its class agree. Right: set. */
ORRERY_IMPORT_("orrery", "set_attribute") int32_t orrery_set_attribute(orrery_handle of, int64_t value);

/*
 * Has the events of a source handled; the parameter is the source's own, the period of a timer in nanoseconds for instance.
 * Returns the subscription's number, from 0 on. Right: subscribe.
 */
ORRERY_IMPORT_("orrery", "subscribe") int32_t orrery_subscribe(orrery_handle source, int64_t parameter);

/* Sends a message to an outlet: its owner's queue, for instance. Right: emit. */
ORRERY_IMPORT_("orrery", "emit") int32_t orrery_emit(orrery_handle to, const void *bytes, size_t length);

/* Returns the monotonic clock in nanoseconds. */
ORRERY_IMPORT_("orrery", "clock") int64_t orrery_clock(void);

/* Logs a line. Control characters are replaced. */
ORRERY_IMPORT_("orrery", "log") int32_t orrery_log(const char *bytes, size_t length);

#endif
