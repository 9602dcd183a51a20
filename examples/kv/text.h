/* Strings in the contents' area. */
#ifndef KV_TEXT_H
#define KV_TEXT_H

#include "slice.h"

struct text {
    uint32_t length;
    uint32_t room;
    char data[];
};

/* The longest string, as Redis has it. */
#define TEXT_MAX ((size_t)512 << 20)

struct text *text_new(struct slice bytes);
void text_free(struct text *text);

/* Gives it other contents. It may move; so does the next one. */
struct text *text_set(struct text *text, struct slice bytes);
struct text *text_append(struct text *text, struct slice bytes);

struct slice text_slice(const struct text *text);

/* What it takes up. */
size_t text_bytes(const struct text *text);

#endif
