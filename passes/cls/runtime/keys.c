/* Keys of thread-specific data (pthread_key_create(3), tss_create(3)): each instance has its own, as many as a process may have. */
#include "own.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

/* A key of an instance has this bit, one of the process does not. */
#define OF_INSTANCE 0x40000000u
/* So many are allocated at a time. */
#define CHUNK 32

/* What there is of a key; `uses` is odd while it exists, and another number each time. */
struct key {
    void (*destructor)(void *);
    unsigned uses;
};

struct orrery_cls_keys {
    struct key *chunks[PTHREAD_KEYS_MAX / CHUNK];
};

/* The value of a key in one thread, from one use of it. */
struct orrery_cls_value {
    void *value;
    unsigned uses;
};

/* Guards the keys of all instances against two threads that make or delete one. */
static pthread_mutex_t lock SHARED;

static struct key *find(size_t index) {
    struct orrery_cls_keys *keys = __atomic_load_n(&own()->keys, __ATOMIC_ACQUIRE);
    if (!keys || index >= PTHREAD_KEYS_MAX)
        return NULL;
    struct key *chunk = __atomic_load_n(&keys->chunks[index / CHUNK], __ATOMIC_ACQUIRE);
    return chunk ? &chunk[index % CHUNK] : NULL;
}

static unsigned uses_of(const struct key *key) { return __atomic_load_n(&key->uses, __ATOMIC_ACQUIRE); }

static struct key *existing(pthread_key_t key) {
    struct key *found = find(key & ~OF_INSTANCE);
    return found && uses_of(found) % 2 == 1 ? found : NULL;
}

static void *zeroed(size_t size) {
    void *memory = __orrery_cls_malloc(size);
    return memory ? memset(memory, 0, size) : NULL;
}

/* Makes room for a key, in the memory of the instance. */
static struct key *extend(size_t index) {
    struct orrery_cls_keys *keys = own()->keys;
    if (!keys && !(keys = zeroed(sizeof *keys)))
        return NULL;
    __atomic_store_n(&own()->keys, keys, __ATOMIC_RELEASE);
    struct key *chunk = zeroed(CHUNK * sizeof *chunk);
    __atomic_store_n(&keys->chunks[index / CHUNK], chunk, __ATOMIC_RELEASE);
    return chunk ? &chunk[index % CHUNK] : NULL;
}

HIDDEN int __orrery_cls_pthread_key_create(pthread_key_t *key, void (*destructor)(void *)) {
    if (!own()->instance)
        return pthread_key_create(key, destructor);
    int error = EAGAIN;
    pthread_mutex_lock(&lock);
    for (unsigned index = 0; index < PTHREAD_KEYS_MAX; index++) {
        struct key *found = find(index);
        if (!found && !(found = extend(index))) {
            error = ENOMEM;
            break;
        }
        if (found->uses % 2 == 1)
            continue;
        found->destructor = destructor;
        __atomic_store_n(&found->uses, found->uses + 1, __ATOMIC_RELEASE);
        *key = index | OF_INSTANCE;
        error = 0;
        break;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

HIDDEN int __orrery_cls_pthread_key_delete(pthread_key_t key) {
    if (!(key & OF_INSTANCE))
        return pthread_key_delete(key);
    pthread_mutex_lock(&lock);
    struct key *found = existing(key);
    if (found)
        __atomic_store_n(&found->uses, found->uses + 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&lock);
    return found ? 0 : EINVAL;
}

HIDDEN int __orrery_cls_pthread_setspecific(pthread_key_t key, const void *value) {
    if (!(key & OF_INSTANCE))
        return pthread_setspecific(key, value);
    struct key *found = existing(key);
    if (!found)
        return EINVAL;
    struct orrery_cls_block *block = orrery_cls_block();
    size_t index = key & ~OF_INSTANCE;
    if (index >= block->value_count) {
        size_t count = (index / CHUNK + 1) * CHUNK;
        struct orrery_cls_value *values = realloc(block->values, count * sizeof *values);
        if (!values)
            return ENOMEM;
        memset(values + block->value_count, 0, (count - block->value_count) * sizeof *values);
        block->values = values;
        block->value_count = count;
    }
    block->values[index] = (struct orrery_cls_value){(void *)value, uses_of(found)};
    return 0;
}

HIDDEN void *__orrery_cls_pthread_getspecific(pthread_key_t key) {
    if (!(key & OF_INSTANCE))
        return pthread_getspecific(key);
    const struct orrery_cls_block *block = orrery_cls_block();
    size_t index = key & ~OF_INSTANCE;
    const struct key *found = index < block->value_count && block->values[index].value ? find(index) : NULL;
    return found && uses_of(found) == block->values[index].uses ? block->values[index].value : NULL;
}

HIDDEN int __orrery_cls_tss_create(tss_t *key, tss_dtor_t destructor) {
    return __orrery_cls_pthread_key_create(key, destructor) ? thrd_error : thrd_success;
}
HIDDEN void __orrery_cls_tss_delete(tss_t key) { __orrery_cls_pthread_key_delete(key); }
HIDDEN void *__orrery_cls_tss_get(tss_t key) { return __orrery_cls_pthread_getspecific(key); }
HIDDEN int __orrery_cls_tss_set(tss_t key, void *value) {
    return __orrery_cls_pthread_setspecific(key, value) ? thrd_error : thrd_success;
}

/* A destructor may set values, also of this key. */
HIDDEN void orrery_cls_run_keys(struct orrery_cls_block *block) {
    for (size_t index = 0; index < block->value_count; index++) {
        struct orrery_cls_value value = block->values[index];
        block->values[index].value = NULL;
        const struct key *key = value.value ? find(index) : NULL;
        if (key && uses_of(key) == value.uses && key->destructor)
            key->destructor(value.value);
    }
}
