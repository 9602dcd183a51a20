#include "commands.h"

#include "protocol.h"

static void push(struct client *client, size_t count, const struct slice *words, bool left) {
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_LIST, &wrong);
    if (wrong)
        return;
    if (!entry)
        entry = store_put(words[1], TYPE_LIST);
    for (size_t i = 2; i < count; i++)
        list_push(entry->value.list, left, words[i]);
    store_changed(entry);
    reply_integer(&client->out, (int64_t)entry->value.list->count);
}

void command_lpush(struct client *client, size_t count, const struct slice *words) {
    push(client, count, words, true);
}

void command_rpush(struct client *client, size_t count, const struct slice *words) {
    push(client, count, words, false);
}

static void pop(struct client *client, size_t count, const struct slice *words, bool left) {
    bool wrong;
    int64_t wanted = 1;
    if (count > 3) {
        reply_error(&client->out, SYNTAX);
        return;
    }
    if (count == 3 && (!slice_to_integer(words[2], &wanted) || wanted < 0)) {
        reply_error(&client->out, "ERR value is out of range, must be positive");
        return;
    }
    struct entry *entry = commands_find(client, words[1], TYPE_LIST, &wrong);
    if (wrong)
        return;
    if (!entry) {
        if (count == 3)
            buffer_add(&client->out, "*-1\r\n", 5);
        else
            reply_null(&client->out);
        return;
    }
    struct list *list = entry->value.list;
    if (wanted > (int64_t)list->count)
        wanted = (int64_t)list->count;
    if (count == 3)
        reply_array(&client->out, (size_t)wanted);
    for (; wanted > 0; wanted--) {
        struct text *text = list_pop(list, left);
        reply_bulk(&client->out, text_slice(text));
        text_free(text);
    }
    if (list->count == 0)
        store_delete(entry);
    else
        store_changed(entry);
}

void command_lpop(struct client *client, size_t count, const struct slice *words) {
    pop(client, count, words, true);
}

void command_rpop(struct client *client, size_t count, const struct slice *words) {
    pop(client, count, words, false);
}

void command_llen(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_LIST, &wrong);
    if (!wrong)
        reply_integer(&client->out, entry ? (int64_t)entry->value.list->count : 0);
}

void command_lrange(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    int64_t first, last;
    if (!slice_to_integer(words[2], &first) || !slice_to_integer(words[3], &last)) {
        reply_error(&client->out, NOT_INTEGER);
        return;
    }
    struct entry *entry = commands_find(client, words[1], TYPE_LIST, &wrong);
    if (wrong)
        return;
    int64_t length = entry ? (int64_t)entry->value.list->count : 0;
    if (first < 0)
        first = first + length < 0 ? 0 : first + length;
    if (last < 0)
        last += length;
    if (last >= length)
        last = length - 1;
    reply_array(&client->out, first <= last ? (size_t)(last - first + 1) : 0);
    for (; first <= last; first++)
        reply_bulk(&client->out, text_slice(list_at(entry->value.list, (size_t)first)));
}
