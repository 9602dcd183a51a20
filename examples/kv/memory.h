/*
 * Where the data live: three areas, so that an orbit only pays for what it looks at.
 *
 *   MEMORY_INDEX      the keys, with the type, the size and the age of each value
 *   MEMORY_CONTENTS   the values
 *   MEMORY_DEADLINES  which key ends when
 *
 * The dump looks at all of them, the watchdog at the index, expiry at the deadlines.
 */
#ifndef KV_MEMORY_H
#define KV_MEMORY_H

#include <stddef.h>

#include <orrery/orbit.h>

enum memory { MEMORY_INDEX, MEMORY_CONTENTS, MEMORY_DEADLINES, MEMORY_KINDS };

/* Makes the areas. Ends the program where that fails. */
void memory_init(size_t capacity);

/* Zeroed memory. Ends the program where there is none: commands ask memory_has_room before. */
void *memory_take(enum memory where, size_t size);
void *memory_resize(enum memory where, void *memory, size_t old_size, size_t size);
void memory_give(enum memory where, void *memory, size_t size);

/* Whether a command that brings so many bytes can be served. */
int memory_has_room(size_t size);

/* How many bytes are taken. */
size_t memory_in_use(enum memory where);
size_t memory_in_use_everywhere(void);

struct orrery_area *memory_area(enum memory where);

#endif
