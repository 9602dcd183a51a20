/* What the files of the runtime share. */
#ifndef ORRERY_PASSES_CLS_OWN_H
#define ORRERY_PASSES_CLS_OWN_H

#include "cls.h"

#define HIDDEN __attribute__((visibility("hidden")))

/* A function to be called at the end of an instance, or of a thread in it. */
struct exit_entry {
    struct exit_entry *next;
    void (*function)(void *);
    void *argument;
};

extern HIDDEN __thread struct orrery_cls_thread __orrery_cls_thread
    __attribute__((tls_model("initial-exec"), aligned(32)));
extern HIDDEN struct orrery_cls_own orrery_cls_own;
extern HIDDEN const struct orrery_cls_host *orrery_cls_host;

/* The runtime is compiled without the pass: it adds the distance itself. */
static inline struct orrery_cls_own *own(void) {
    return (struct orrery_cls_own *)((char *)&orrery_cls_own + __orrery_cls_thread.delta);
}

HIDDEN void orrery_cls_run(struct exit_entry **list);
HIDDEN void orrery_cls_forget(void);
HIDDEN void orrery_cls_end_blocks(void);
/* Has the end of the calling thread noticed. Returns 0, or an errno. */
HIDDEN int orrery_cls_watch_thread(void);

HIDDEN void *__orrery_cls_malloc(size_t size);
HIDDEN void __orrery_cls_free(void *memory);

#endif
