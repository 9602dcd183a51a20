#include "slice.h"

#include <string.h>
#include <strings.h>

struct slice slice_of(const char *text) {
    return (struct slice){text, strlen(text)};
}

bool slice_equal(struct slice a, struct slice b) {
    return a.length == b.length && memcmp(a.data, b.data, a.length) == 0;
}

bool slice_is(struct slice slice, const char *word) {
    return slice.length == strlen(word) && strncasecmp(slice.data, word, slice.length) == 0;
}

bool slice_to_integer(struct slice slice, int64_t *number) {
    size_t i = 0;
    bool negative = slice.length > 0 && slice.data[0] == '-';
    if (negative)
        i++;
    if (i == slice.length || (slice.data[i] == '0' && slice.length > 1))
        return false;
    int64_t value = 0;
    for (; i < slice.length; i++) {
        int digit = slice.data[i] - '0';
        if (digit < 0 || digit > 9)
            return false;
        if (__builtin_mul_overflow(value, 10, &value))
            return false;
        if (__builtin_add_overflow(value, negative ? -digit : digit, &value))
            return false;
    }
    *number = value;
    return true;
}

/* Whether a byte is in the set that begins behind '['; stores how long the set is, its ']' included. */
static bool in_set(char byte, struct slice set, size_t *length) {
    size_t i = 0;
    bool inverted = set.length > 0 && set.data[0] == '^';
    if (inverted)
        i++;
    bool found = false;
    while (i < set.length && set.data[i] != ']') {
        if (set.data[i] == '\\' && i + 1 < set.length)
            i++;
        unsigned char low = (unsigned char)set.data[i], high = low;
        if (i + 2 < set.length && set.data[i + 1] == '-') {
            high = (unsigned char)set.data[i + 2];
            i += 2;
        }
        if (low > high) {
            unsigned char other = low;
            low = high;
            high = other;
        }
        if ((unsigned char)byte >= low && (unsigned char)byte <= high)
            found = true;
        i++;
    }
    *length = i < set.length ? i + 1 : i;
    return found != inverted;
}

/* Takes no more than text times pattern steps: only the last star is ever tried again. */
bool slice_matches(struct slice text, struct slice pattern) {
    size_t t = 0, p = 0, star = SIZE_MAX, retry = 0;
    for (;;) {
        if (p < pattern.length && pattern.data[p] == '*') {
            star = ++p;
            retry = t;
            continue;
        }
        bool matches = false;
        size_t step = 1;
        if (t == text.length && p == pattern.length)
            return true;
        if (t < text.length && p < pattern.length) {
            struct slice rest = {pattern.data + p + 1, pattern.length - p - 1};
            switch (pattern.data[p]) {
            case '?':
                matches = true;
                break;
            case '[':
                matches = in_set(text.data[t], rest, &step);
                step++;
                break;
            case '\\':
                if (rest.length > 0)
                    step = 2;
                matches = pattern.data[p + step - 1] == text.data[t];
                break;
            default:
                matches = pattern.data[p] == text.data[t];
            }
        }
        if (matches) {
            t++;
            p += step;
        } else if (star != SIZE_MAX && retry < text.length) {
            t = ++retry;
            p = star;
        } else {
            return false;
        }
    }
}
