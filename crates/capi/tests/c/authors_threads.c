/* Threads may allocate and free from one allocator of the orbit authors' library at the same time. */
#include <pthread.h>
#include <stdlib.h>

#include <orbit/orbit.h>

#include "check_authors.h"

enum { THREADS = 4, PARTS = 3000, SIZE = 40 };

static struct orbit_allocator *allocator;
static unsigned char *parts[THREADS][PARTS];
static pthread_barrier_t begin;

static int is_whole(const unsigned char *part, int thread) {
    for (int at = 0; at < SIZE; at++)
        if (part[at] != thread + 1)
            return 0;
    return 1;
}

static void *allocate(void *number) {
    int thread = (int)(long)number;
    pthread_barrier_wait(&begin);
    for (int part = 0; part < PARTS; part++) {
        parts[thread][part] = orbit_alloc(allocator, SIZE);
        memset(parts[thread][part], thread + 1, SIZE);
        /* Every third stays until the end. */
        if (part % 3 == 2) {
            CHECK(is_whole(parts[thread][part - 1], thread) && is_whole(parts[thread][part - 2], thread));
            orbit_free(allocator, parts[thread][part - 1]);
            orbit_free(allocator, parts[thread][part - 2]);
        }
    }
    return NULL;
}

static void run(bool use_meta) {
    struct orbit_pool *pool = orbit_pool_create(NULL, 4 << 20);
    pthread_t threads[THREADS];
    CHECK(pool);
    allocator = orbit_allocator_from_pool(pool, use_meta);
    CHECK(allocator);
    for (long thread = 0; thread < THREADS; thread++)
        CHECK(pthread_create(&threads[thread], NULL, allocate, (void *)thread) == 0);
    for (int thread = 0; thread < THREADS; thread++)
        CHECK(pthread_join(threads[thread], NULL) == 0);
    for (int thread = 0; thread < THREADS; thread++)
        for (int part = 2; part < PARTS; part += 3)
            CHECK(is_whole(parts[thread][part], thread));
    /* Without notes of sizes nothing is freed, and the count is that of all parts. */
    CHECK(use_meta || pool->used >= (size_t)THREADS * PARTS * SIZE);
    CHECK(pool->used >= (size_t)THREADS * PARTS / 3 * SIZE && pool->used <= pool->length);
}

int main(void) {
    CHECK(pthread_barrier_init(&begin, NULL, THREADS) == 0);
    run(true);
    run(false);
    return 0;
}
