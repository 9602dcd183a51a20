#include "protocol.h"

#include <err.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "text.h"

#define LONGEST_LINE ((size_t)64 << 10)
#define MOST_WORDS ((int64_t)1 << 20)

static void add_word(struct request *request, struct slice word) {
    if (request->count == request->room) {
        request->room = request->room ? 2 * request->room : 16;
        request->words = realloc(request->words, request->room * sizeof *request->words);
        if (!request->words)
            err(1, "a request of %zu words", request->room);
    }
    request->words[request->count++] = word;
}

/* The line from `at` on without its end; `at` goes behind it. */
static enum parsed take_line(struct slice bytes, size_t *at, struct slice *line) {
    const char *begin = bytes.data + *at;
    const char *end = memchr(begin, '\n', bytes.length - *at);
    if (!end)
        return bytes.length - *at > LONGEST_LINE ? PARSED_NONSENSE : PARSED_PART;
    *at += (size_t)(end - begin) + 1;
    if (end > begin && end[-1] == '\r')
        end--;
    *line = (struct slice){begin, (size_t)(end - begin)};
    return PARSED_WHOLE;
}

/* What a person types into telnet: words between blanks. */
static void split_words(struct slice line, struct request *request) {
    size_t i = 0;
    while (i < line.length) {
        if (line.data[i] == ' ' || line.data[i] == '\t') {
            i++;
            continue;
        }
        size_t begin = i;
        while (i < line.length && line.data[i] != ' ' && line.data[i] != '\t')
            i++;
        add_word(request, (struct slice){line.data + begin, i - begin});
    }
}

enum parsed request_parse(struct slice bytes, struct request *request, size_t *length, const char **why) {
    request->count = 0;
    *why = "Protocol error: too big inline request";
    size_t at = 0;
    struct slice line;
    enum parsed parsed = take_line(bytes, &at, &line);
    if (parsed != PARSED_WHOLE)
        return parsed;
    if (line.length == 0 || line.data[0] != '*') {
        split_words(line, request);
        *length = at;
        return PARSED_WHOLE;
    }
    int64_t count, size;
    struct slice digits = {line.data + 1, line.length - 1};
    if (!slice_to_integer(digits, &count) || count > MOST_WORDS) {
        *why = "Protocol error: invalid multibulk length";
        return PARSED_NONSENSE;
    }
    for (; count > 0; count--) {
        *why = "Protocol error: too big bulk count string";
        parsed = take_line(bytes, &at, &line);
        if (parsed != PARSED_WHOLE)
            return parsed;
        if (line.length == 0 || line.data[0] != '$') {
            *why = "Protocol error: expected '$'";
            return PARSED_NONSENSE;
        }
        digits = (struct slice){line.data + 1, line.length - 1};
        if (!slice_to_integer(digits, &size) || size < 0 || (size_t)size > TEXT_MAX) {
            *why = "Protocol error: invalid bulk length";
            return PARSED_NONSENSE;
        }
        if (bytes.length - at < (size_t)size + 2)
            return PARSED_PART;
        add_word(request, (struct slice){bytes.data + at, (size_t)size});
        at += (size_t)size + 2;
    }
    *length = at;
    return PARSED_WHOLE;
}

static void add_line(struct buffer *out, char kind, const char *text) {
    buffer_add(out, &kind, 1);
    buffer_add(out, text, strlen(text));
    buffer_add(out, "\r\n", 2);
}

static void add_number(struct buffer *out, char kind, int64_t number) {
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)number);
    add_line(out, kind, text);
}

void reply_status(struct buffer *out, const char *text) { add_line(out, '+', text); }

void reply_error(struct buffer *out, const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    for (char *byte = text; *byte; byte++) {
        if (*byte == '\r' || *byte == '\n')
            *byte = ' ';
    }
    add_line(out, '-', text);
}

void reply_integer(struct buffer *out, int64_t number) { add_number(out, ':', number); }

void reply_bulk(struct buffer *out, struct slice bytes) {
    add_number(out, '$', (int64_t)bytes.length);
    buffer_add(out, bytes.data, bytes.length);
    buffer_add(out, "\r\n", 2);
}

void reply_null(struct buffer *out) { buffer_add(out, "$-1\r\n", 5); }

void reply_array(struct buffer *out, size_t count) { add_number(out, '*', (int64_t)count); }
