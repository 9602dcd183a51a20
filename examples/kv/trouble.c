#include "trouble.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool trouble_named(struct slice name, enum trouble *trouble) {
    static const char *const names[] = {"none", "crash", "assert", "exit", "hang", "spin", "memory", "lie"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        if (slice_is(name, names[i])) {
            *trouble = (enum trouble)i;
            return true;
        }
    }
    return false;
}

static int *volatile nowhere;

static void take_all_memory(void) {
    const size_t size = (size_t)8 << 20;
    for (;;) {
        char *memory = malloc(size);
        /* Whoever does not look at what malloc says writes to a null pointer. */
        memset(memory, 1, size);
        __asm__ volatile("" : : "r"(memory) : "memory");
    }
}

void trouble_make(enum trouble trouble) {
    switch (trouble) {
    case TROUBLE_CRASH:
        *nowhere = 1;
        break;
    case TROUBLE_ASSERT:
        abort();
    case TROUBLE_EXIT:
        exit(3);
    case TROUBLE_HANG:
        for (;;)
            pause();
    case TROUBLE_SPIN:
        for (;;)
            __asm__ volatile("");
    case TROUBLE_MEMORY:
        take_all_memory();
        break;
    case TROUBLE_NONE:
    case TROUBLE_LIE:
        break;
    }
}
