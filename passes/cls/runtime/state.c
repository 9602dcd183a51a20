/* The state of the library, its constructors and destructors, and the descriptor that the loader reads. */
#include "own.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SECTION(type, name) extern type __start_orrery_cls_##name[] HIDDEN, __stop_orrery_cls_##name[] HIDDEN;
#define WEAK_SECTION(type, name)                                                                             \
    extern type __start_orrery_cls_##name[] HIDDEN __attribute__((weak));                                    \
    extern type __stop_orrery_cls_##name[] HIDDEN __attribute__((weak));

/* What the pass records about a constructor: its priority, and how far away it is. */
struct constructor {
    int32_t priority;
    int32_t distance;
};

SECTION(char, data)
WEAK_SECTION(char, bss)
WEAK_SECTION(char, tls)
WEAK_SECTION(const struct orrery_cls_unit, units)
WEAK_SECTION(const struct constructor, ctors)
WEAK_SECTION(const struct constructor, dtors)

__thread struct orrery_cls_thread __orrery_cls_thread;
const struct orrery_cls_host *orrery_cls_host __attribute__((section("orrery_cls_shared_bss")));
struct orrery_cls_own orrery_cls_own __attribute__((section("orrery_cls_data"))) = {0};

static char *saved __attribute__((section("orrery_cls_shared_bss")));
static size_t saved_size __attribute__((section("orrery_cls_shared_bss")));

static const char *pristine(size_t *size) {
    *size = saved_size;
    return saved;
}

static struct orrery_cls_thread *thread(void) { return &__orrery_cls_thread; }
static void set_host(const struct orrery_cls_host *host) { orrery_cls_host = host; }

static void call(const struct constructor *entry) {
    ((void (*)(void))((uintptr_t)entry + (uintptr_t)(intptr_t)entry->distance))();
}

/* By priority; equal ones in the order of the link. Lists are short. */
static void run_ascending(const struct constructor *from, const struct constructor *to) {
    int64_t done = -1;
    for (;;) {
        int64_t next = INT64_MAX;
        for (const struct constructor *at = from; at < to; at++)
            if (at->priority > done && at->priority < next)
                next = at->priority;
        if (next == INT64_MAX)
            return;
        for (const struct constructor *at = from; at < to; at++)
            if (at->priority == next)
                call(at);
        done = next;
    }
}

static void run_descending(const struct constructor *from, const struct constructor *to) {
    int64_t done = INT64_MAX;
    for (;;) {
        int64_t next = -1;
        for (const struct constructor *at = from; at < to; at++)
            if (at->priority < done && at->priority > next)
                next = at->priority;
        if (next == -1)
            return;
        for (const struct constructor *at = to; at-- > from;)
            if (at->priority == next)
                call(at);
        done = next;
    }
}

static void construct(void) { run_ascending(__start_orrery_cls_ctors, __stop_orrery_cls_ctors); }

static void destruct(void) {
    orrery_cls_end_blocks();
    orrery_cls_run(&own()->exits);
    run_descending(__start_orrery_cls_dtors, __stop_orrery_cls_dtors);
    orrery_cls_forget();
}

/* From the first to the last byte of state. */
static void extent(char **from, char **to) {
    char *parts[][2] = {{__start_orrery_cls_data, __stop_orrery_cls_data},
                        {__start_orrery_cls_bss, __stop_orrery_cls_bss},
                        {__start_orrery_cls_tls, __stop_orrery_cls_tls}};
    *from = parts[0][0];
    *to = parts[0][1];
    for (int i = 1; i < 3; i++) {
        if (parts[i][0] == parts[i][1])
            continue;
        if (parts[i][0] < *from)
            *from = parts[i][0];
        if (parts[i][1] > *to)
            *to = parts[i][1];
    }
}

/* The dynamic loader runs constructors in the library's own state; instances begin as it was before. */
__attribute__((constructor(101))) static void start(void) {
    if (&__start_orrery_cls_ctors[0] == &__stop_orrery_cls_ctors[0])
        return;
    char *from, *to;
    extent(&from, &to);
    size_t size = (size_t)(to - from);
    char *copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy != MAP_FAILED) {
        memcpy(copy, from, size);
        saved_size = size;
        saved = copy;
    }
    construct();
}

__attribute__((destructor(101))) static void end(void) {
    if (__orrery_cls_thread.delta == 0)
        run_descending(__start_orrery_cls_dtors, __stop_orrery_cls_dtors);
    if (saved)
        munmap(saved, saved_size);
}

__attribute__((visibility("default"), used)) const struct orrery_cls_descriptor orrery_cls_descriptor = {
    .version = ORRERY_CLS_VERSION,
    .size = sizeof(struct orrery_cls_descriptor),
    .extent = extent,
    .units = __start_orrery_cls_units,
    .units_end = __stop_orrery_cls_units,
    .pristine = pristine,
    .thread = thread,
    .set_host = set_host,
    .construct = construct,
    .destruct = destruct,
    .forget = orrery_cls_forget,
    .own = &orrery_cls_own,
};
