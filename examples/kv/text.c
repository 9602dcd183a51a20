#include "text.h"

#include <string.h>

#include "memory.h"

static size_t bytes_for(size_t room) { return sizeof(struct text) + room; }

struct text *text_new(struct slice bytes) {
    struct text *text = memory_take(MEMORY_CONTENTS, bytes_for(bytes.length));
    text->length = text->room = (uint32_t)bytes.length;
    memcpy(text->data, bytes.data, bytes.length);
    return text;
}

void text_free(struct text *text) { memory_give(MEMORY_CONTENTS, text, text_bytes(text)); }

struct text *text_set(struct text *text, struct slice bytes) {
    if (bytes.length > text->room || bytes.length < text->room / 2) {
        text_free(text);
        return text_new(bytes);
    }
    text->length = (uint32_t)bytes.length;
    memcpy(text->data, bytes.data, bytes.length);
    return text;
}

struct text *text_append(struct text *text, struct slice bytes) {
    size_t length = text->length + bytes.length;
    if (length > text->room) {
        size_t room = length < ((size_t)1 << 20) ? 2 * length : length + ((size_t)1 << 20);
        text = memory_resize(MEMORY_CONTENTS, text, text_bytes(text), bytes_for(room));
        text->room = (uint32_t)room;
    }
    memcpy(text->data + text->length, bytes.data, bytes.length);
    text->length = (uint32_t)length;
    return text;
}

struct slice text_slice(const struct text *text) {
    return (struct slice){text->data, text->length};
}

size_t text_bytes(const struct text *text) { return bytes_for(text->room); }
