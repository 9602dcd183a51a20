#include "commands.h"

#include <inttypes.h>
#include <stdio.h>

#include "clock.h"
#include "protocol.h"

static void reply_text(struct client *client, const struct entry *entry) {
    if (entry && entry->type == TYPE_STRING)
        reply_bulk(&client->out, text_slice(entry->value.text));
    else
        reply_null(&client->out);
}

void command_get(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_STRING, &wrong);
    if (!wrong)
        reply_text(client, entry);
}

/* What stands behind SET's value. */
struct set_options {
    int64_t deadline; /* 0 for none */
    bool keep_deadline;
    bool if_absent;
    bool if_present;
    bool get;
};

static const char *parse_set(size_t count, const struct slice *words, struct set_options *options) {
    for (size_t i = 3; i < count; i++) {
        bool seconds = slice_is(words[i], "ex"), milliseconds = slice_is(words[i], "px");
        if (slice_is(words[i], "nx") && !options->if_present) {
            options->if_absent = true;
        } else if (slice_is(words[i], "xx") && !options->if_absent) {
            options->if_present = true;
        } else if (slice_is(words[i], "get")) {
            options->get = true;
        } else if (slice_is(words[i], "keepttl") && options->deadline == 0) {
            options->keep_deadline = true;
        } else if ((seconds || milliseconds) && i + 1 < count && options->deadline == 0 &&
                   !options->keep_deadline) {
            int64_t time;
            if (!slice_to_integer(words[++i], &time))
                return NOT_INTEGER;
            if (time <= 0 || __builtin_mul_overflow(time, seconds ? 1000 : 1, &time) ||
                __builtin_add_overflow(time, clock_milliseconds(), &options->deadline))
                return "ERR invalid expire time in 'set' command";
        } else {
            return SYNTAX;
        }
    }
    return NULL;
}

void command_set(struct client *client, size_t count, const struct slice *words) {
    struct set_options options = {0};
    const char *wrong = parse_set(count, words, &options);
    struct entry *entry = store_find(words[1]);
    if (!wrong && options.get && entry && entry->type != TYPE_STRING)
        wrong = WRONG_TYPE;
    if (wrong) {
        reply_error(&client->out, "%s", wrong);
        return;
    }
    if (options.get)
        reply_text(client, entry);
    bool set = entry ? !options.if_absent : !options.if_present;
    if (set) {
        int64_t deadline = options.keep_deadline && entry ? store_deadline(entry) : options.deadline;
        entry = store_put_text(words[1], words[2]);
        if (deadline)
            store_set_deadline(entry, deadline);
    }
    if (options.get)
        return;
    if (set)
        reply_status(&client->out, "OK");
    else
        reply_null(&client->out);
}

void command_append(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_STRING, &wrong);
    if (wrong)
        return;
    if (!entry) {
        entry = store_put_text(words[1], words[2]);
    } else if (entry->value.text->length + words[2].length > TEXT_MAX) {
        reply_error(&client->out, "ERR string exceeds maximum allowed size (512MB)");
        return;
    } else {
        entry->value.text = text_append(entry->value.text, words[2]);
        store_changed(entry);
    }
    reply_integer(&client->out, entry->value.text->length);
}

void command_strlen(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_STRING, &wrong);
    if (!wrong)
        reply_integer(&client->out, entry ? entry->value.text->length : 0);
}

static void add(struct client *client, struct slice key, int64_t change, bool negative) {
    bool wrong;
    struct entry *entry = commands_find(client, key, TYPE_STRING, &wrong);
    if (wrong)
        return;
    int64_t value = 0;
    if (entry && !slice_to_integer(text_slice(entry->value.text), &value)) {
        reply_error(&client->out, NOT_INTEGER);
        return;
    }
    bool too_much = negative ? __builtin_sub_overflow(value, change, &value)
                             : __builtin_add_overflow(value, change, &value);
    if (too_much) {
        reply_error(&client->out, "ERR increment or decrement would overflow");
        return;
    }
    char text[24];
    struct slice digits = {text, (size_t)snprintf(text, sizeof text, "%" PRId64, value)};
    if (entry) {
        entry->value.text = text_set(entry->value.text, digits);
        store_changed(entry);
    } else {
        store_put_text(key, digits);
    }
    reply_integer(&client->out, value);
}

void command_incr(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    add(client, words[1], 1, false);
}

void command_decr(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    add(client, words[1], 1, true);
}

static void add_given(struct client *client, const struct slice *words, bool negative) {
    int64_t change;
    if (slice_to_integer(words[2], &change))
        add(client, words[1], change, negative);
    else
        reply_error(&client->out, NOT_INTEGER);
}

void command_incrby(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    add_given(client, words, false);
}

void command_decrby(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    add_given(client, words, true);
}

void command_mget(struct client *client, size_t count, const struct slice *words) {
    reply_array(&client->out, count - 1);
    for (size_t i = 1; i < count; i++)
        reply_text(client, store_find(words[i]));
}

void command_mset(struct client *client, size_t count, const struct slice *words) {
    if (count % 2 == 0) {
        reply_error(&client->out, "ERR wrong number of arguments for 'mset' command");
        return;
    }
    for (size_t i = 1; i < count; i += 2)
        store_put_text(words[i], words[i + 1]);
    reply_status(&client->out, "OK");
}
