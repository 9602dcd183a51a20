#include "memory.h"

#include <err.h>
#include <stdlib.h>

/* What a command may need beside the bytes that it brings: tables that double, and the areas' own
 * fragmentation. */
#define RESERVE ((size_t)64 << 20)

static struct orrery_area *areas[MEMORY_KINDS];
static size_t in_use[MEMORY_KINDS];
static size_t most;

void memory_init(size_t capacity) {
    struct orrery_area_options options = ORRERY_AREA_OPTIONS_INIT;
    options.capacity = capacity;
    most = capacity;
    for (int i = 0; i < MEMORY_KINDS; i++) {
        areas[i] = orrery_area_create_with(64 << 10, &options);
        if (!areas[i])
            errx(1, "cannot make an area of %zu bytes: %s; try a smaller --capacity", capacity,
                 orrery_last_error());
    }
}

static void exhausted(enum memory where, size_t size) {
    errx(1, "no %zu bytes of memory beside the %zu in use: %s", size, in_use[where], orrery_last_error());
}

void *memory_take(enum memory where, size_t size) {
    void *memory = orrery_area_alloc(areas[where], size);
    if (!memory)
        exhausted(where, size);
    in_use[where] += size;
    return memory;
}

void *memory_resize(enum memory where, void *memory, size_t old_size, size_t size) {
    memory = orrery_area_realloc(areas[where], memory, size);
    if (!memory)
        exhausted(where, size);
    in_use[where] += size - old_size;
    return memory;
}

void memory_give(enum memory where, void *memory, size_t size) {
    if (!memory)
        return;
    if (orrery_area_free(areas[where], memory) < 0)
        errx(1, "memory is given back that was never taken: %s", orrery_last_error());
    in_use[where] -= size;
}

int memory_has_room(size_t size) {
    for (int i = 0; i < MEMORY_KINDS; i++) {
        if (in_use[i] + in_use[i] / 4 + 2 * size + RESERVE > most)
            return 0;
    }
    return 1;
}

size_t memory_in_use(enum memory where) { return in_use[where]; }

size_t memory_in_use_everywhere(void) {
    size_t sum = 0;
    for (int i = 0; i < MEMORY_KINDS; i++)
        sum += in_use[i];
    return sum;
}

struct orrery_area *memory_area(enum memory where) {
    return areas[where];
}
