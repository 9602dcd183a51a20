/* Hashes: fields with strings. */
#ifndef KV_HASH_H
#define KV_HASH_H

#include "table.h"
#include "text.h"

struct field {
    struct node node;
    struct text *value;
    char name[];
};

struct hash {
    struct table fields;
    size_t bytes; /* all that it takes up but the table's buckets */
};

struct hash *hash_new(void);
void hash_free(struct hash *hash);

/* NULL where there is none. */
struct field *hash_find(struct hash *hash, struct slice name);

/* Whether the field is new. */
bool hash_set(struct hash *hash, struct slice name, struct slice value);

/* Whether it was there. */
bool hash_remove(struct hash *hash, struct slice name);

#endif
