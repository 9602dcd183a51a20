/* Thread-local variables, one per thread and instance; threads that a library makes; functions at exit. */
#include "own.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern char __start_orrery_cls_tls[] HIDDEN __attribute__((weak));
extern char __stop_orrery_cls_tls[] HIDDEN __attribute__((weak));
extern void *__dso_handle;

extern int __cxa_atexit(void (*function)(void *), void *argument, void *library);

/* Guards the lists of blocks. */
static pthread_mutex_t lock SHARED;
static pthread_key_t key SHARED;
static int has_key SHARED;

/* The instance in which the library made the calling thread; null in threads that others made. */
static __thread void *made_in __attribute__((tls_model("initial-exec")));
/* In how many rounds of destructors of keys the calling thread's end was noticed. */
static __thread unsigned rounds __attribute__((tls_model("initial-exec")));

static void fatal(const char *text) {
    fprintf(stderr, "orrery: %s\n", text);
    abort();
}

HIDDEN void orrery_cls_run(struct exit_entry **list) {
    while (*list) {
        struct exit_entry *entry = *list;
        *list = entry->next;
        entry->function(entry->argument);
        __orrery_cls_free(entry);
    }
}

/* An entry is a part of the instance, as the list is. */
static int push(struct exit_entry **list, void (*function)(void *), void *argument) {
    struct exit_entry *entry = __orrery_cls_malloc(sizeof *entry);
    if (!entry)
        return -1;
    *entry = (struct exit_entry){*list, function, argument};
    *list = entry;
    return 0;
}

static void unlink_of_thread(struct orrery_cls_block *block) {
    struct orrery_cls_block **at = &block->thread->blocks;
    while (*at != block)
        at = &(*at)->next_of_thread;
    *at = block->next_of_thread;
    /* The thread itself may find another block meanwhile; then it looks that up once more. */
    if (__atomic_load_n(&block->thread->block, __ATOMIC_RELAXED) == block->bytes)
        __atomic_store_n(&block->thread->block, NULL, __ATOMIC_RELAXED);
}

/* What the calling thread uses from now on in the instance that it is in. */
static void use_block(const struct orrery_cls_block *block) {
    __orrery_cls_thread.block_delta = block->delta;
    __atomic_store_n(&__orrery_cls_thread.block, block->bytes, __ATOMIC_RELAXED);
}

static void drop(struct orrery_cls_block *block) {
    free(block->values);
    free(block->bytes);
    free(block);
}

/* Returns a block of the calling thread whose destructors have not run in this round; null if there is none. */
static struct orrery_cls_block *next_of_round(struct orrery_cls_thread *thread) {
    pthread_mutex_lock(&lock);
    struct orrery_cls_block *block = thread->blocks;
    while (block && block->round == rounds)
        block = block->next_of_thread;
    if (block)
        block->round = rounds;
    pthread_mutex_unlock(&lock);
    return block;
}

/*
 * The calling thread ends: so do its variables in every instance. Destructors of keys, those of other libraries, too, may use them, and
 * run in several rounds, as often as keys have values again. So the variables go in the last one.
 */
static void thread_ends(void *words) {
    struct orrery_cls_thread *thread = words;
    intptr_t delta = thread->delta;
    rounds++;
    for (struct orrery_cls_block *block; (block = next_of_round(thread));) {
        use_instance(thread, block->delta);
        use_block(block);
        orrery_cls_run(&block->exits);
        orrery_cls_run_keys(block);
    }
    use_instance(thread, delta);
    if (rounds < PTHREAD_DESTRUCTOR_ITERATIONS && !pthread_setspecific(key, words))
        return;
    for (;;) {
        pthread_mutex_lock(&lock);
        struct orrery_cls_block *block = thread->blocks;
        pthread_mutex_unlock(&lock);
        if (!block)
            break;
        use_instance(thread, block->delta);
        use_block(block);
        orrery_cls_run(&block->exits);
        pthread_mutex_lock(&lock);
        struct orrery_cls_block **at = &own()->blocks;
        while (*at != block)
            at = &(*at)->next_of_instance;
        *at = block->next_of_instance;
        unlink_of_thread(block);
        pthread_mutex_unlock(&lock);
        drop(block);
    }
    use_instance(thread, delta);
    if (made_in) {
        /* What runs in the thread after this runs in no instance. */
        use_instance(thread, 0);
        orrery_cls_host->thread_ends(made_in);
    }
}

HIDDEN int orrery_cls_watch_thread(void) {
    pthread_mutex_lock(&lock);
    int failed = has_key ? 0 : pthread_key_create(&key, thread_ends);
    has_key |= !failed;
    pthread_mutex_unlock(&lock);
    return failed ? failed : pthread_setspecific(key, &__orrery_cls_thread);
}

__attribute__((destructor(102))) static void unload(void) {
    if (has_key)
        pthread_key_delete(key);
}

/* Where the pointer to a block is: behind its variables. */
static struct orrery_cls_block **behind(char *bytes) {
    size_t size = (size_t)(__stop_orrery_cls_tls - __start_orrery_cls_tls);
    return (struct orrery_cls_block **)(bytes + (size + 7) / 8 * 8);
}

static struct orrery_cls_block *current_block(void) {
    struct orrery_cls_thread *thread = &__orrery_cls_thread;
    struct orrery_cls_block *block;
    pthread_mutex_lock(&lock);
    for (block = thread->blocks; block && block->delta != thread->delta;)
        block = block->next_of_thread;
    pthread_mutex_unlock(&lock);
    if (block) {
        use_block(block);
        return block;
    }
    size_t size = (size_t)(__stop_orrery_cls_tls - __start_orrery_cls_tls);
    block = calloc(1, sizeof *block);
    /* As the section is aligned, which is a page at most. */
    if (!block || posix_memalign((void **)&block->bytes, size > 2048 ? 4096 : 1024, size + 16) ||
        orrery_cls_watch_thread())
        fatal("no memory for the thread-local variables of an instance");
    memcpy(block->bytes, __start_orrery_cls_tls + thread->delta, size);
    *behind(block->bytes) = block;
    block->thread = thread;
    block->delta = thread->delta;
    pthread_mutex_lock(&lock);
    block->next_of_thread = thread->blocks;
    thread->blocks = block;
    block->next_of_instance = own()->blocks;
    own()->blocks = block;
    pthread_mutex_unlock(&lock);
    use_block(block);
    return block;
}

/* What the pass adds the offset of a thread-local variable to. */
HIDDEN char *__orrery_cls_thread_block(void) {
    const struct orrery_cls_thread *thread = &__orrery_cls_thread;
    char *block = __atomic_load_n(&thread->block, __ATOMIC_RELAXED);
    int current = block && thread->block_delta == thread->delta;
    return __builtin_expect(current, 1) ? block : current_block()->bytes;
}

HIDDEN struct orrery_cls_block *orrery_cls_block(void) { return *behind(__orrery_cls_thread_block()); }

/* At the end of an instance: destructors of all threads' variables, here. No thread is in the instance any more. */
HIDDEN void orrery_cls_end_blocks(void) {
    for (struct orrery_cls_block *block = own()->blocks; block; block = block->next_of_instance) {
        use_block(block);
        orrery_cls_run(&block->exits);
    }
    __atomic_store_n(&__orrery_cls_thread.block, NULL, __ATOMIC_RELAXED);
}

HIDDEN void orrery_cls_forget(void) {
    struct orrery_cls_own *state = own();
    for (;;) {
        pthread_mutex_lock(&lock);
        struct orrery_cls_block *block = state->blocks;
        if (block) {
            state->blocks = block->next_of_instance;
            unlink_of_thread(block);
        }
        pthread_mutex_unlock(&lock);
        if (!block)
            break;
        drop(block);
    }
}

HIDDEN int __orrery_cls_cxa_atexit(void (*function)(void *), void *argument, void *library) {
    return own()->instance ? push(&own()->exits, function, argument)
                           : __cxa_atexit(function, argument, library);
}

HIDDEN int __orrery_cls_atexit(void (*function)(void)) {
    return __orrery_cls_cxa_atexit((void (*)(void *))function, NULL, __dso_handle);
}

HIDDEN int __orrery_cls_cxa_thread_atexit(void (*function)(void *), void *argument, void *library) {
    (void)library;
    (void)__orrery_cls_thread_block();
    return push(&current_block()->exits, function, argument);
}

struct start {
    void *(*function)(void *);
    void *argument;
    void *instance;
    intptr_t delta;
};

static void *run(void *of) {
    struct start start = *(struct start *)of;
    free(of);
    made_in = start.instance;
    use_instance(&__orrery_cls_thread, start.delta);
    if (orrery_cls_watch_thread())
        fatal("no memory for a thread of an instance");
    return start.function(start.argument);
}

/* A thread is in the instance that it was made in. */
HIDDEN int __orrery_cls_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                                       void *(*function)(void *), void *argument) {
    if (!own()->instance)
        return pthread_create(thread, attributes, function, argument);
    struct start *start = malloc(sizeof *start);
    if (!start)
        return EAGAIN;
    void *instance = own()->instance;
    *start = (struct start){function, argument, instance, __orrery_cls_thread.delta};
    orrery_cls_host->thread_starts(instance);
    int failed = pthread_create(thread, attributes, run, start);
    if (failed) {
        free(start);
        orrery_cls_host->thread_ends(instance);
    }
    return failed;
}
