#include "buffer.h"

#include <err.h>
#include <stdlib.h>
#include <string.h>

#define USUAL ((size_t)16 << 10)

struct slice buffer_slice(const struct buffer *buffer) {
    return (struct slice){buffer->data + buffer->begin, buffer->end - buffer->begin};
}

size_t buffer_length(const struct buffer *buffer) { return buffer->end - buffer->begin; }

char *buffer_space(struct buffer *buffer, size_t size) {
    if (buffer->room - buffer->end < size) {
        size_t length = buffer_length(buffer);
        if (length > 0)
            memmove(buffer->data, buffer->data + buffer->begin, length);
        buffer->begin = 0;
        buffer->end = length;
        if (buffer->room - length < size) {
            size_t room = buffer->room ? buffer->room : USUAL;
            while (room - length < size)
                room *= 2;
            buffer->data = realloc(buffer->data, room);
            if (!buffer->data)
                err(1, "a buffer of %zu bytes", room);
            buffer->room = room;
        }
    }
    return buffer->data + buffer->end;
}

void buffer_added(struct buffer *buffer, size_t size) { buffer->end += size; }

void buffer_add(struct buffer *buffer, const void *data, size_t size) {
    if (size == 0)
        return;
    memcpy(buffer_space(buffer, size), data, size);
    buffer_added(buffer, size);
}

void buffer_drop(struct buffer *buffer, size_t size) {
    buffer->begin += size;
    if (buffer->begin < buffer->end)
        return;
    buffer->begin = buffer->end = 0;
    if (buffer->room > 64 * USUAL)
        buffer_free(buffer);
}

void buffer_free(struct buffer *buffer) {
    free(buffer->data);
    *buffer = (struct buffer){0};
}
