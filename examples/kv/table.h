/*
 * Hash tables in an area. They grow and shrink a few buckets at a time, so that no command has to wait for
 * it.
 *
 * Nodes belong to whoever adds them, and are the first field of what they are nodes of.
 */
#ifndef KV_TABLE_H
#define KV_TABLE_H

#include "memory.h"
#include "slice.h"

struct node {
    struct node *next;
    uint64_t hash;
    const char *key;
    size_t key_length;
};

/* While it changes its size, nodes are in both halves: in the first those from bucket `moved` on. */
struct table {
    struct {
        struct node **buckets;
        size_t size;
    } half[2];
    size_t moved;
    size_t count;
    enum memory where;
};

typedef void (*table_visit)(struct node *node, void *context);

/* Makes hashes that nobody outside can foresee. */
void table_seed(void);

void table_init(struct table *table, enum memory where);

/* Returns what the table itself took. The nodes must have gone. */
void table_free(struct table *table);

struct slice node_key(const struct node *node);

struct node *table_find(struct table *table, struct slice key);

/* Adds a node, whose key is not there yet. */
void table_add(struct table *table, struct node *node);

/* Takes a node out of the table. */
void table_remove(struct table *table, struct node *node);

/* All nodes. Changes nothing, so that an orbit may do it too. The visitor may free the node. */
void table_each(const struct table *table, table_visit visit, void *context);

/*
 * Some of the nodes, and the cursor for more; 0 at the end. Between the calls the table may change: a node
 * that is there from beginning to end is visited, some twice.
 */
uint64_t table_scan(const struct table *table, uint64_t cursor, table_visit visit, void *context);

#endif
