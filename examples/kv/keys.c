#include "commands.h"

#include <inttypes.h>
#include <stdio.h>

#include "clock.h"
#include "protocol.h"

void command_del(struct client *client, size_t count, const struct slice *words) {
    int64_t deleted = 0;
    for (size_t i = 1; i < count; i++) {
        struct entry *entry = store_find(words[i]);
        if (!entry)
            continue;
        store_delete(entry);
        deleted++;
    }
    reply_integer(&client->out, deleted);
}

void command_exists(struct client *client, size_t count, const struct slice *words) {
    int64_t found = 0;
    for (size_t i = 1; i < count; i++)
        found += store_find(words[i]) != NULL;
    reply_integer(&client->out, found);
}

void command_type(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    struct entry *entry = store_find(words[1]);
    reply_status(&client->out, entry ? type_name((enum type)entry->type) : "none");
}

static void expire(struct client *client, const struct slice *words, int64_t unit) {
    int64_t time;
    if (!slice_to_integer(words[2], &time)) {
        reply_error(&client->out, NOT_INTEGER);
        return;
    }
    if (__builtin_mul_overflow(time, unit, &time) ||
        __builtin_add_overflow(time, clock_milliseconds(), &time)) {
        reply_error(&client->out, "ERR invalid expire time in 'expire' command");
        return;
    }
    struct entry *entry = store_find(words[1]);
    if (entry && time <= clock_milliseconds())
        store_delete(entry);
    else if (entry)
        store_set_deadline(entry, time);
    reply_integer(&client->out, entry != NULL);
}

void command_expire(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    expire(client, words, 1000);
}

void command_pexpire(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    expire(client, words, 1);
}

static void time_left(struct client *client, struct slice key, int64_t unit) {
    struct entry *entry = store_find(key);
    int64_t left = -2;
    if (entry && !entry->deadline)
        left = -1;
    else if (entry)
        left = (store_deadline(entry) - clock_milliseconds() + unit / 2) / unit;
    reply_integer(&client->out, left);
}

void command_ttl(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    time_left(client, words[1], 1000);
}

void command_pttl(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    time_left(client, words[1], 1);
}

void command_persist(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    struct entry *entry = store_find(words[1]);
    bool had = entry && entry->deadline;
    if (had)
        store_set_deadline(entry, 0);
    reply_integer(&client->out, had);
}

/* Keys found so far, as replies. */
struct found {
    struct buffer replies;
    size_t count;
    struct slice pattern;
    struct slice type;
};

static void match(struct node *node, void *context) {
    struct found *found = context;
    const struct entry *entry = (const struct entry *)node;
    bool over = entry->deadline && store_deadline(entry) <= clock_milliseconds();
    if (over || !slice_matches(node_key(node), found->pattern))
        return;
    if (found->type.data && !slice_is(found->type, type_name((enum type)entry->type)))
        return;
    reply_bulk(&found->replies, node_key(node));
    found->count++;
}

static void reply_found(struct client *client, struct found *found) {
    struct slice replies = buffer_slice(&found->replies);
    reply_array(&client->out, found->count);
    buffer_add(&client->out, replies.data, replies.length);
    buffer_free(&found->replies);
}

void command_keys(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    struct found found = {.pattern = words[1]};
    table_each(store_table(), match, &found);
    reply_found(client, &found);
}

void command_scan(struct client *client, size_t count, const struct slice *words) {
    int64_t cursor, wanted = 10;
    struct found found = {.pattern = slice_of("*")};
    bool good = slice_to_integer(words[1], &cursor) && cursor >= 0 && count % 2 == 0;
    for (size_t i = 2; good && i < count; i += 2) {
        if (slice_is(words[i], "match"))
            found.pattern = words[i + 1];
        else if (slice_is(words[i], "type"))
            found.type = words[i + 1];
        else
            good = slice_is(words[i], "count") && slice_to_integer(words[i + 1], &wanted) && wanted > 0;
    }
    if (!good) {
        reply_error(&client->out, SYNTAX);
        return;
    }
    uint64_t at = (uint64_t)cursor;
    do
        at = table_scan(store_table(), at, match, &found);
    while (at != 0 && --wanted > 0);
    char text[24];
    snprintf(text, sizeof text, "%" PRIu64, at);
    reply_array(&client->out, 2);
    reply_bulk(&client->out, slice_of(text));
    reply_found(client, &found);
}

void command_dbsize(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    reply_integer(&client->out, (int64_t)store_count());
}

void command_flushall(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    store_clear();
    reply_status(&client->out, "OK");
}
