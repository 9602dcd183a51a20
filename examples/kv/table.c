#include "table.h"

#include <err.h>
#include <string.h>
#include <sys/random.h>

#define SMALLEST 8

/* How many buckets with nodes each operation moves, and past how many empty ones it goes for that. */
#define STEP 2
#define EMPTY_STEPS 40

static uint64_t seed;

void table_seed(void) {
    if (getrandom(&seed, sizeof seed, 0) != sizeof seed)
        err(1, "getrandom");
}

static uint64_t mix(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    wide product = (wide)(a ^ 0x9e3779b97f4a7c15) * (b ^ 0xd1b54a32d192ed03);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t hash_of(struct slice key) {
    uint64_t hash = mix(seed, key.length), word;
    size_t i = 0;
    for (; i + sizeof word <= key.length; i += sizeof word) {
        memcpy(&word, key.data + i, sizeof word);
        hash = mix(hash ^ seed, word);
    }
    word = 0;
    memcpy(&word, key.data + i, key.length - i);
    return mix(hash ^ seed, word);
}

void table_init(struct table *table, enum memory where) { *table = (struct table){.where = where}; }

static void give_half(struct table *table, int half) {
    memory_give(table->where, table->half[half].buckets, table->half[half].size * sizeof(struct node *));
    table->half[half].buckets = NULL;
    table->half[half].size = 0;
}

void table_free(struct table *table) {
    give_half(table, 0);
    give_half(table, 1);
    table->moved = table->count = 0;
}

struct slice node_key(const struct node *node) {
    return (struct slice){node->key, node->key_length};
}

static struct node **bucket(const struct table *table, int half, uint64_t hash) {
    return &table->half[half].buckets[hash & (table->half[half].size - 1)];
}

static void move_some(struct table *table) {
    if (!table->half[1].size)
        return;
    int filled = STEP;
    for (int steps = EMPTY_STEPS; steps > 0 && filled > 0 && table->moved < table->half[0].size; steps--) {
        struct node **from = &table->half[0].buckets[table->moved++];
        filled -= *from != NULL;
        while (*from) {
            struct node *node = *from;
            *from = node->next;
            struct node **to = bucket(table, 1, node->hash);
            node->next = *to;
            *to = node;
        }
    }
    if (table->moved == table->half[0].size) {
        give_half(table, 0);
        table->half[0] = table->half[1];
        table->half[1].buckets = NULL;
        table->half[1].size = 0;
        table->moved = 0;
    }
}

static void fit(struct table *table) {
    size_t size = table->half[0].size;
    if (table->half[1].size || (table->count <= size && (size <= SMALLEST || table->count >= size / 8)))
        return;
    int half = size ? 1 : 0;
    size_t wanted = SMALLEST;
    while (wanted < table->count)
        wanted *= 2;
    table->half[half].buckets = memory_take(table->where, wanted * sizeof(struct node *));
    table->half[half].size = wanted;
}

struct node *table_find(struct table *table, struct slice key) {
    move_some(table);
    uint64_t hash = hash_of(key);
    for (int half = 0; half < 2 && table->half[half].size; half++) {
        for (struct node *node = *bucket(table, half, hash); node; node = node->next) {
            if (node->hash == hash && slice_equal(node_key(node), key))
                return node;
        }
    }
    return NULL;
}

void table_add(struct table *table, struct node *node) {
    node->hash = hash_of(node_key(node));
    table->count++;
    fit(table);
    move_some(table);
    struct node **first = bucket(table, table->half[1].size ? 1 : 0, node->hash);
    node->next = *first;
    *first = node;
}

void table_remove(struct table *table, struct node *node) {
    for (int half = 0; half < 2 && table->half[half].size; half++) {
        for (struct node **link = bucket(table, half, node->hash); *link; link = &(*link)->next) {
            if (*link == node) {
                *link = node->next;
                table->count--;
                fit(table);
                move_some(table);
                return;
            }
        }
    }
}

static void visit_bucket(const struct table *table, int half, size_t index, table_visit visit,
                         void *context) {
    struct node *node = table->half[half].buckets[index];
    while (node) {
        struct node *next = node->next;
        visit(node, context);
        node = next;
    }
}

void table_each(const struct table *table, table_visit visit, void *context) {
    for (int half = 0; half < 2; half++) {
        for (size_t i = half ? 0 : table->moved; i < table->half[half].size; i++)
            visit_bucket(table, half, i, visit, context);
    }
}

static uint64_t reversed(uint64_t bits) {
    uint64_t result = 0;
    for (int i = 0; i < 64; i++)
        result |= ((bits >> i) & 1) << (63 - i);
    return result;
}

/* Counts upwards with the highest bit as the lowest, so that buckets that split or join are not skipped. */
static uint64_t next_cursor(uint64_t cursor, uint64_t mask) { return reversed(reversed(cursor | ~mask) + 1); }

uint64_t table_scan(const struct table *table, uint64_t cursor, table_visit visit, void *context) {
    if (!table->half[0].size)
        return 0;
    uint64_t mask = table->half[0].size - 1;
    if (!table->half[1].size) {
        visit_bucket(table, 0, cursor & mask, visit, context);
        return next_cursor(cursor, mask);
    }
    int small = table->half[0].size <= table->half[1].size ? 0 : 1;
    uint64_t few = table->half[small].size - 1, many = table->half[!small].size - 1;
    visit_bucket(table, small, cursor & few, visit, context);
    do {
        visit_bucket(table, !small, cursor & many, visit, context);
        cursor = next_cursor(cursor, many);
    } while (cursor & (few ^ many));
    return cursor;
}
