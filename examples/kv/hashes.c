#include "commands.h"

#include "protocol.h"

void command_hset(struct client *client, size_t count, const struct slice *words) {
    bool wrong;
    if (count % 2 != 0) {
        reply_error(&client->out, "ERR wrong number of arguments for 'hset' command");
        return;
    }
    struct entry *entry = commands_find(client, words[1], TYPE_HASH, &wrong);
    if (wrong)
        return;
    if (!entry)
        entry = store_put(words[1], TYPE_HASH);
    int64_t added = 0;
    for (size_t i = 2; i < count; i += 2)
        added += hash_set(entry->value.hash, words[i], words[i + 1]);
    store_changed(entry);
    reply_integer(&client->out, added);
}

void command_hget(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_HASH, &wrong);
    if (wrong)
        return;
    struct field *field = entry ? hash_find(entry->value.hash, words[2]) : NULL;
    if (field)
        reply_bulk(&client->out, text_slice(field->value));
    else
        reply_null(&client->out);
}

void command_hdel(struct client *client, size_t count, const struct slice *words) {
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_HASH, &wrong);
    if (wrong)
        return;
    int64_t removed = 0;
    for (size_t i = 2; entry && i < count; i++)
        removed += hash_remove(entry->value.hash, words[i]);
    if (entry && entry->value.hash->fields.count == 0)
        store_delete(entry);
    else if (removed > 0)
        store_changed(entry);
    reply_integer(&client->out, removed);
}

static void reply_pair(struct node *node, void *context) {
    struct client *client = context;
    reply_bulk(&client->out, node_key(node));
    reply_bulk(&client->out, text_slice(((struct field *)node)->value));
}

void command_hgetall(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_HASH, &wrong);
    if (wrong)
        return;
    reply_array(&client->out, entry ? 2 * entry->value.hash->fields.count : 0);
    if (entry)
        table_each(&entry->value.hash->fields, reply_pair, client);
}

void command_hlen(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    bool wrong;
    struct entry *entry = commands_find(client, words[1], TYPE_HASH, &wrong);
    if (!wrong)
        reply_integer(&client->out, entry ? (int64_t)entry->value.hash->fields.count : 0);
}
