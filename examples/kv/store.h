/* The keys and their values. */
#ifndef KV_STORE_H
#define KV_STORE_H

#include "hash.h"
#include "list.h"
#include "table.h"
#include "text.h"

enum type { TYPE_STRING, TYPE_LIST, TYPE_HASH, TYPES };

/* A key and what is known of its value without looking at it. Lies in the index. */
struct entry {
    struct node node;
    size_t bytes;      /* that key and value take up */
    uint32_t deadline; /* where it is in the list of deadlines, counted from 1; 0 if it has none */
    uint32_t accessed; /* in seconds since 1970; only kept up to date where memory is limited */
    uint8_t type;      /* enum type */
    union {
        struct text *text;
        struct list *list;
        struct hash *hash;
    } value;
    char key[];
};

/* When a key ends, in milliseconds since 1970. */
struct deadline {
    int64_t at;
    struct entry *entry;
};

/* All deadlines, in no order. Lies in the area for deadlines. */
struct deadlines {
    struct deadline *list;
    size_t count;
    size_t room;
};

void store_init(void);

/* For orbits: what to look at. */
const struct table *store_table(void);
const struct deadlines *store_deadlines(void);

size_t store_count(void);

/* The entry of a key, or NULL. One whose time is over is deleted. */
struct entry *store_find(struct slice key);

/* A new entry with an empty value (no text at all for a string), in place of what was there. */
struct entry *store_put(struct slice key, enum type type);

/* The string with these bytes, in place of what was there; no deadline. */
struct entry *store_put_text(struct slice key, struct slice bytes);

/* To be called after each change of a value. */
void store_changed(struct entry *entry);

void store_delete(struct entry *entry);
void store_clear(void);

/* 0 stands for none. */
void store_set_deadline(struct entry *entry, int64_t at);
int64_t store_deadline(const struct entry *entry);

/* Deletes the entry of this deadline, if it is still what an orbit saw and its time is over. */
bool store_expire(size_t index, struct deadline seen);

/* Every entry's time is over or not as of now: this is how often one was deleted for that. */
uint64_t store_expired(void);

/* How many changes there were. */
uint64_t store_changes(void);

/* Equal for equal stores, however they came about. */
uint64_t store_digest(void);

const char *type_name(enum type type);

#endif
