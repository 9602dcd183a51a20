/* What the files of the runtime share. */
#ifndef ORRERY_PASSES_CLS_OWN_H
#define ORRERY_PASSES_CLS_OWN_H

#include "cls.h"

#define HIDDEN __attribute__((visibility("hidden")))
/* Of a variable: there is one for all instances. */
#define SHARED __attribute__((section("orrery_cls_shared_bss")))

/* A function to be called at the end of an instance, or of a thread in it. */
struct exit_entry {
    struct exit_entry *next;
    void (*function)(void *);
    void *argument;
};

/* The thread-local variables of one thread in one instance. They lie at `bytes`. */
struct orrery_cls_block {
    struct orrery_cls_block *next_of_thread;
    struct orrery_cls_block *next_of_instance;
    struct orrery_cls_thread *thread;
    intptr_t delta;
    struct exit_entry *exits;
    char *bytes;
    struct orrery_cls_value *values; /* of keys, by number */
    size_t value_count;
    unsigned round; /* of the end of the thread, in which its destructors ran last */
};

extern HIDDEN __thread struct orrery_cls_thread __orrery_cls_thread
    __attribute__((tls_model("initial-exec"), aligned(32)));
extern HIDDEN struct orrery_cls_own orrery_cls_own;
extern HIDDEN const struct orrery_cls_host *orrery_cls_host;

/* The runtime is compiled without the pass: it adds the distance itself. */
static inline struct orrery_cls_own *own(void) {
    return (struct orrery_cls_own *)((char *)&orrery_cls_own + __orrery_cls_thread.delta);
}

/* Has the calling thread, which has these words, use the instance at a distance. */
static inline void use_instance(struct orrery_cls_thread *thread, intptr_t delta) {
    thread->delta = delta;
    if (orrery_cls_host && orrery_cls_host->set_base)
        orrery_cls_host->set_base(delta);
}

HIDDEN void orrery_cls_run(struct exit_entry **list);
HIDDEN void orrery_cls_forget(void);
HIDDEN void orrery_cls_end_blocks(void);
/* Has the end of the calling thread noticed. Returns 0, or an errno. */
HIDDEN int orrery_cls_watch_thread(void);

/* Returns what the calling thread has in the instance that it is in. */
HIDDEN struct orrery_cls_block *orrery_cls_block(void);
/* Runs the destructors of the values that keys have in a block of the current instance, once each. */
HIDDEN void orrery_cls_run_keys(struct orrery_cls_block *block);

HIDDEN void *__orrery_cls_malloc(size_t size);
HIDDEN void __orrery_cls_free(void *memory);

#endif
