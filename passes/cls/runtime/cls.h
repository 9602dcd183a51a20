/*
 * What a library that was built with the pass shows to the loader of instances, and what the loader gives to it.
 *
 * Both are one version: a loader refuses libraries of another one.
 */
#ifndef ORRERY_PASSES_CLS_RUNTIME_H
#define ORRERY_PASSES_CLS_RUNTIME_H

#include <stddef.h>
#include <stdint.h>

#define ORRERY_CLS_VERSION 3

/*
 * The words of a thread. The pass reads the first, which alone changes where a thread enters or leaves an instance: what else
 * is known of the instance is found by it. Where a unit of the library uses GS, its base is always the same.
 */
struct orrery_cls_thread {
    intptr_t delta;                  /* from the library's own state to that of the current instance */
    char *block;                     /* the thread-local variables that were found last, or null */
    intptr_t block_delta;            /* the instance whose variables they are */
    struct orrery_cls_block *blocks; /* this thread's thread-local variables in all instances */
};

/* What the loader does for a library. `instance` is what the loader stored in the instance's state. */
struct orrery_cls_host {
    uintptr_t heap_start; /* where all instances have their memory */
    size_t heap_size;
    void *(*allocate)(void *instance, size_t size, size_t alignment);
    void (*release)(void *instance, void *memory);
    void *(*resize)(void *instance, void *memory, size_t size);
    size_t (*usable_size)(void *instance, void *memory);
    void (*thread_starts)(void *instance); /* in the thread that makes another */
    void (*thread_ends)(void *instance);
    void (*set_base)(
        intptr_t delta); /* of GS, in the calling thread; null where no unit of the library uses it */
};

/* The variables of the runtime itself that each instance has. */
struct orrery_cls_own {
    void *instance;                  /* stored by the loader; null in the library's own state */
    struct exit_entry *exits;        /* functions to be called at the end of the instance */
    struct orrery_cls_block *blocks; /* thread-local variables of all threads; a copy of the state has none */
    struct orrery_cls_keys *keys;    /* of thread-specific data */
};

/* How large a unit's alignment is, whether it has accesses relative to GS, and a reference that is for the linker. */
struct orrery_cls_unit {
    uint32_t alignment : 31;
    uint32_t uses_gs : 1;
    int32_t distance;
};

struct orrery_cls_descriptor {
    uint32_t version;
    uint32_t size;                          /* of this structure */
    void (*extent)(char **from, char **to); /* from the first to the last byte of state */
    const struct orrery_cls_unit *units, *units_end;
    const char *(*pristine)(size_t *size);     /* the state before constructors ran; null if there are none */
    struct orrery_cls_thread *(*thread)(void); /* the words of the calling thread */
    void (*set_host)(const struct orrery_cls_host *);
    void (*construct)(void);    /* in an instance: runs constructors */
    void (*destruct)(void);     /* in an instance: runs destructors */
    void (*forget)(void);       /* in an instance: drops all threads' thread-local variables */
    struct orrery_cls_own *own; /* in the library's own state */
};

#endif
