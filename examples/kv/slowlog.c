#include "slowlog.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "protocol.h"
#include "server.h"
#include "settings.h"

#define MOST_WORDS 32
#define LONGEST_WORD 128

enum what { NOTE, GET, LENGTH, RESET };

/* A slow command: its words, each behind two bytes that say how long it is. */
struct slow {
    int64_t id;
    int64_t seconds;
    int64_t microseconds;
    uint32_t words;
    uint32_t size;
    char text[860];
};

struct question {
    enum what what;
    enum trouble trouble;
    int64_t count; /* of entries to keep, or to tell */
    struct slow slow;
};

/* ---- in the orbit ---- */

struct kept {
    struct kept *next;
    struct slow slow;
};

/* The store. */
struct log {
    struct kept *newest;
    int64_t length;
};

static void *new_log(void) { return calloc(1, sizeof(struct log)); }

static void cut(struct log *log, int64_t length) {
    struct kept **link = &log->newest;
    for (int64_t i = 0; i < length && *link; i++)
        link = &(*link)->next;
    while (*link) {
        struct kept *old = *link;
        *link = old->next;
        free(old);
        log->length--;
    }
}

static void tell(const struct log *log, int64_t count) {
    orrery_orbit_update *update = orrery_orbit_update_create();
    for (struct kept *kept = log->newest; kept && count > 0; kept = kept->next, count--)
        orrery_orbit_update_add_data(update, &kept->slow, sizeof kept->slow);
    orrery_orbit_push(update);
    orrery_orbit_update_destroy(update);
}

static long serve(void *argument, void *store) {
    struct question *question = argument;
    struct log *log = store;
    switch (question->what) {
    case NOTE: {
        struct kept *kept = malloc(sizeof *kept);
        if (!kept)
            return -1;
        trouble_make(question->trouble);
        kept->slow = question->slow;
        kept->next = log->newest;
        log->newest = kept;
        log->length++;
        cut(log, question->count);
        break;
    }
    case GET:
        tell(log, question->count);
        break;
    case LENGTH:
        break;
    case RESET:
        cut(log, 0);
        break;
    }
    return log->length;
}

/* ---- in main ---- */

static int64_t next_id;
static const struct sight nothing;

static void noted(long value, const char *trouble, uint64_t context) {
    (void)value, (void)trouble, (void)context;
}

static void create(void) {
    struct orrery_orbit_options options = companion_short_task();
    companion_create(&slowlog.companion, serve, new_log, &options);
}

static bool note(struct question *question) {
    question->what = NOTE;
    question->count = settings.slowlog_length;
    size_t size = offsetof(struct question, slow.text) + question->slow.size;
    return companion_call(&slowlog.companion, &nothing, question, size, (struct handler){.done = noted});
}

void slowlog_note(const struct client *client, size_t count, const struct slice *words,
                  int64_t microseconds) {
    (void)client;
    static struct question question;
    question.trouble = TROUBLE_NONE;
    struct slow *slow = &question.slow;
    slow->id = next_id++;
    slow->seconds = clock_milliseconds() / 1000;
    slow->microseconds = microseconds;
    slow->words = slow->size = 0;
    for (size_t i = 0; i < count && i < MOST_WORDS; i++) {
        uint16_t length = (uint16_t)(words[i].length < LONGEST_WORD ? words[i].length : LONGEST_WORD);
        if (slow->size + sizeof length + length > sizeof slow->text)
            break;
        memcpy(slow->text + slow->size, &length, sizeof length);
        memcpy(slow->text + slow->size + sizeof length, words[i].data, length);
        slow->size += (uint32_t)sizeof length + length;
        slow->words++;
    }
    note(&question);
}

static bool call(enum trouble trouble) {
    struct question question = {.trouble = trouble, .slow.id = next_id++};
    return note(&question);
}

struct auxiliary slowlog = {.companion.name = "slowlog", .create = create, .call = call};

/* Entries that were told for the client that asked, until the call is over. */
static struct buffer told;
static size_t told_count;

/* Whether an entry is one: a broken orbit must not make main read beyond its end. */
static bool is_whole(const struct slow *slow) {
    size_t at = 0;
    uint16_t length;
    for (uint32_t i = 0; i < slow->words; i++) {
        if (at + sizeof length > sizeof slow->text)
            return false;
        memcpy(&length, slow->text + at, sizeof length);
        at += sizeof length + length;
        if (at > sizeof slow->text)
            return false;
    }
    return slow->words <= MOST_WORDS;
}

static bool tell_client(const void *data, size_t size, uint64_t context) {
    (void)context;
    struct slow slow;
    if (size != sizeof slow)
        return false;
    memcpy(&slow, data, sizeof slow);
    if (!is_whole(&slow))
        return false;
    reply_array(&told, 6);
    reply_integer(&told, slow.id);
    reply_integer(&told, slow.seconds);
    reply_integer(&told, slow.microseconds);
    reply_array(&told, slow.words);
    const char *at = slow.text;
    for (uint32_t i = 0; i < slow.words; i++) {
        uint16_t length;
        memcpy(&length, at, sizeof length);
        reply_bulk(&told, (struct slice){at + sizeof length, length});
        at += sizeof length + length;
    }
    reply_bulk(&told, slice_of(""));
    reply_bulk(&told, slice_of(""));
    told_count++;
    return true;
}

static void answer(struct client *client, enum what what, long value, const char *trouble) {
    if (trouble)
        reply_error(&client->out, "ERR the slow log's orbit failed: %s", trouble);
    else if (what == GET) {
        struct slice entries = buffer_slice(&told);
        reply_array(&client->out, told_count);
        buffer_add(&client->out, entries.data, entries.length);
    } else if (what == LENGTH)
        reply_integer(&client->out, value);
    else
        reply_status(&client->out, "OK");
    server_answered(client);
}

#define DONE(function, what)                                                                                 \
    static void function(long value, const char *trouble, uint64_t context) {                                \
        struct client *client = server_client(context);                                                      \
        if (client)                                                                                          \
            answer(client, what, value, trouble);                                                            \
        buffer_free(&told);                                                                                  \
        told_count = 0;                                                                                      \
    }

DONE(got, GET)
DONE(measured, LENGTH)
DONE(was_reset, RESET)

static bool ask(struct client *client, enum what what, int64_t count,
                void (*done)(long value, const char *trouble, uint64_t context)) {
    struct question question = {.what = what, .count = count};
    struct handler handler = {.data = tell_client, .done = done, .context = client->id};
    client->waiting =
        companion_call(&slowlog.companion, &nothing, &question, offsetof(struct question, slow), handler);
    return client->waiting;
}

bool slowlog_get(struct client *client, int64_t count) { return ask(client, GET, count, got); }
bool slowlog_length(struct client *client) { return ask(client, LENGTH, 0, measured); }
bool slowlog_reset(struct client *client) { return ask(client, RESET, 0, was_reset); }
