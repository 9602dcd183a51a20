/* Bytes that somebody else keeps. */
#ifndef KV_SLICE_H
#define KV_SLICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct slice {
    const char *data;
    size_t length;
};

struct slice slice_of(const char *text);

bool slice_equal(struct slice a, struct slice b);

/* Whether it is this word, in whatever case. */
bool slice_is(struct slice slice, const char *word);

/* The whole slice as a decimal number. */
bool slice_to_integer(struct slice slice, int64_t *number);

/* Redis' patterns: * ? [abc] [^a-z] and \ before any of them. */
bool slice_matches(struct slice text, struct slice pattern);

#endif
