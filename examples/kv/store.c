#include "store.h"

#include <string.h>

#include "checksum.h"
#include "clock.h"
#include "settings.h"

static struct table *keys;
static struct deadlines *deadlines;
static uint64_t expired, changes;

void store_init(void) {
    table_seed();
    keys = memory_take(MEMORY_INDEX, sizeof *keys);
    table_init(keys, MEMORY_INDEX);
    deadlines = memory_take(MEMORY_DEADLINES, sizeof *deadlines);
}

const struct table *store_table(void) { return keys; }
const struct deadlines *store_deadlines(void) { return deadlines; }
size_t store_count(void) { return keys->count; }
uint64_t store_expired(void) { return expired; }
uint64_t store_changes(void) { return changes; }

static size_t entry_bytes(const struct entry *entry) { return sizeof *entry + entry->node.key_length; }

static void touch(struct entry *entry) {
    if (settings.max_memory == 0)
        return;
    uint32_t now = (uint32_t)(clock_milliseconds() / 1000);
    if (entry->accessed != now)
        entry->accessed = now;
}

static void free_value(struct entry *entry) {
    switch (entry->type) {
    case TYPE_STRING:
        if (entry->value.text)
            text_free(entry->value.text);
        break;
    case TYPE_LIST:
        list_free(entry->value.list);
        break;
    case TYPE_HASH:
        hash_free(entry->value.hash);
        break;
    }
}

static void forget_deadline(struct entry *entry) {
    if (!entry->deadline)
        return;
    struct deadline *last = &deadlines->list[--deadlines->count];
    if (last->entry != entry) {
        deadlines->list[entry->deadline - 1] = *last;
        last->entry->deadline = entry->deadline;
    }
    entry->deadline = 0;
}

void store_set_deadline(struct entry *entry, int64_t at) {
    if (at == 0) {
        forget_deadline(entry);
        return;
    }
    if (!entry->deadline) {
        if (deadlines->count == deadlines->room) {
            size_t size = sizeof *deadlines->list, room = deadlines->room ? 2 * deadlines->room : 64;
            deadlines->list = deadlines->list ? memory_resize(MEMORY_DEADLINES, deadlines->list,
                                                              deadlines->room * size, room * size)
                                              : memory_take(MEMORY_DEADLINES, room * size);
            deadlines->room = room;
        }
        entry->deadline = (uint32_t)++deadlines->count;
    }
    deadlines->list[entry->deadline - 1] = (struct deadline){at, entry};
}

int64_t store_deadline(const struct entry *entry) {
    return entry->deadline ? deadlines->list[entry->deadline - 1].at : 0;
}

bool store_expire(size_t index, struct deadline seen) {
    if (index >= deadlines->count)
        return false;
    struct deadline now = deadlines->list[index];
    if (now.entry != seen.entry || now.at != seen.at || now.at > clock_milliseconds())
        return false;
    expired++;
    store_delete(now.entry);
    return true;
}

struct entry *store_find(struct slice key) {
    struct entry *entry = (struct entry *)table_find(keys, key);
    if (entry && entry->deadline && store_deadline(entry) <= clock_milliseconds()) {
        expired++;
        store_delete(entry);
        return NULL;
    }
    if (entry)
        touch(entry);
    return entry;
}

static void new_value(struct entry *entry, enum type type) {
    entry->type = (uint8_t)type;
    switch (type) {
    case TYPE_LIST:
        entry->value.list = list_new();
        break;
    case TYPE_HASH:
        entry->value.hash = hash_new();
        break;
    default:
        entry->value.text = NULL;
    }
}

struct entry *store_put(struct slice key, enum type type) {
    struct entry *entry = store_find(key);
    if (entry) {
        forget_deadline(entry);
        free_value(entry);
    } else {
        entry = memory_take(MEMORY_INDEX, sizeof *entry + key.length);
        memcpy(entry->key, key.data, key.length);
        entry->node.key = entry->key;
        entry->node.key_length = key.length;
        entry->accessed = (uint32_t)(clock_milliseconds() / 1000);
        table_add(keys, &entry->node);
    }
    new_value(entry, type);
    return entry;
}

struct entry *store_put_text(struct slice key, struct slice bytes) {
    struct entry *entry = store_find(key);
    if (entry && entry->type == TYPE_STRING) {
        forget_deadline(entry);
        struct text *text = text_set(entry->value.text, bytes);
        /* What stays the same is not written: a page less for the orbits. */
        if (text != entry->value.text)
            entry->value.text = text;
    } else {
        entry = store_put(key, TYPE_STRING);
        entry->value.text = text_new(bytes);
    }
    store_changed(entry);
    return entry;
}

void store_changed(struct entry *entry) {
    size_t bytes = entry_bytes(entry);
    switch (entry->type) {
    case TYPE_STRING:
        bytes += text_bytes(entry->value.text);
        break;
    case TYPE_LIST:
        bytes += entry->value.list->bytes;
        break;
    case TYPE_HASH:
        bytes += entry->value.hash->bytes;
        break;
    }
    if (entry->bytes != bytes)
        entry->bytes = bytes;
    changes++;
}

static void free_entry(struct node *node, void *context) {
    (void)context;
    struct entry *entry = (struct entry *)node;
    free_value(entry);
    memory_give(MEMORY_INDEX, entry, entry_bytes(entry));
}

void store_delete(struct entry *entry) {
    table_remove(keys, &entry->node);
    forget_deadline(entry);
    free_entry(&entry->node, NULL);
    changes++;
}

void store_clear(void) {
    changes += keys->count;
    deadlines->count = 0;
    table_each(keys, free_entry, NULL);
    table_free(keys);
}

const char *type_name(enum type type) {
    static const char *const names[TYPES] = {"string", "list", "hash"};
    return type < TYPES ? names[type] : "none";
}

/* Each part is summed up on its own, so that the order of keys and fields does not matter. */
static uint64_t digest_of(struct slice a, struct slice b) {
    uint64_t sum = checksum(0, &a.length, sizeof a.length);
    sum = checksum(sum, a.data, a.length);
    sum = checksum(sum, b.data, b.length);
    return sum * 0x9e3779b97f4a7c15;
}

static void digest_field(struct node *node, void *context) {
    *(uint64_t *)context += digest_of(node_key(node), text_slice(((struct field *)node)->value));
}

static void digest_entry(struct node *node, void *context) {
    const struct entry *entry = (struct entry *)node;
    uint64_t value = entry->type;
    switch (entry->type) {
    case TYPE_STRING:
        value += digest_of(slice_of("string"), text_slice(entry->value.text));
        break;
    case TYPE_LIST:
        for (size_t i = 0; i < entry->value.list->count; i++) {
            struct slice index = {(const char *)&i, sizeof i};
            value += digest_of(index, text_slice(list_at(entry->value.list, i)));
        }
        break;
    case TYPE_HASH:
        table_each(&entry->value.hash->fields, digest_field, &value);
        break;
    }
    struct {
        uint64_t value;
        int64_t deadline;
    } rest = {value, store_deadline(entry)};
    *(uint64_t *)context += digest_of(node_key(node), (struct slice){(const char *)&rest, sizeof rest});
}

uint64_t store_digest(void) {
    uint64_t digest = 0;
    table_each(keys, digest_entry, &digest);
    return digest;
}
