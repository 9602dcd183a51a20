/* Bytes that come at one end and go at the other; ordinary memory, as orbits need not see it. */
#ifndef KV_BUFFER_H
#define KV_BUFFER_H

#include "slice.h"

struct buffer {
    char *data;
    size_t begin;
    size_t end;
    size_t room;
};

struct slice buffer_slice(const struct buffer *buffer);
size_t buffer_length(const struct buffer *buffer);

/* Where the next `size` bytes can be put; buffer_added says how many were. */
char *buffer_space(struct buffer *buffer, size_t size);
void buffer_added(struct buffer *buffer, size_t size);

void buffer_add(struct buffer *buffer, const void *data, size_t size);

/* Takes bytes away from the beginning. */
void buffer_drop(struct buffer *buffer, size_t size);

void buffer_free(struct buffer *buffer);

#endif
