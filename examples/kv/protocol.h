/* RESP2: requests from bytes, and replies to bytes. */
#ifndef KV_PROTOCOL_H
#define KV_PROTOCOL_H

#include "buffer.h"

/* A request, whose words are in the bytes that it was read from. */
struct request {
    struct slice *words;
    size_t count;
    size_t room;
};

enum parsed { PARSED_WHOLE, PARSED_PART, PARSED_NONSENSE };

/*
 * Reads the request at the beginning of some bytes. Whole: stores how long it is (a request may have no words
 * at all). Nonsense: stores why.
 */
enum parsed request_parse(struct slice bytes, struct request *request, size_t *length, const char **why);

void reply_status(struct buffer *out, const char *text);
__attribute__((format(printf, 2, 3))) void reply_error(struct buffer *out, const char *format, ...);
void reply_integer(struct buffer *out, int64_t number);
void reply_bulk(struct buffer *out, struct slice bytes);
void reply_null(struct buffer *out);
void reply_array(struct buffer *out, size_t count);

#endif
