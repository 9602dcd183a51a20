#include "hash.h"

#include <string.h>

struct hash *hash_new(void) {
    struct hash *hash = memory_take(MEMORY_CONTENTS, sizeof *hash);
    table_init(&hash->fields, MEMORY_CONTENTS);
    hash->bytes = sizeof *hash;
    return hash;
}

static size_t field_bytes(const struct field *field) { return sizeof *field + field->node.key_length; }

static void free_field(struct node *node, void *context) {
    (void)context;
    struct field *field = (struct field *)node;
    text_free(field->value);
    memory_give(MEMORY_CONTENTS, field, field_bytes(field));
}

void hash_free(struct hash *hash) {
    table_each(&hash->fields, free_field, NULL);
    table_free(&hash->fields);
    memory_give(MEMORY_CONTENTS, hash, sizeof *hash);
}

struct field *hash_find(struct hash *hash, struct slice name) {
    return (struct field *)table_find(&hash->fields, name);
}

bool hash_set(struct hash *hash, struct slice name, struct slice value) {
    struct field *field = hash_find(hash, name);
    bool is_new = !field;
    if (field) {
        hash->bytes -= text_bytes(field->value);
        field->value = text_set(field->value, value);
    } else {
        field = memory_take(MEMORY_CONTENTS, sizeof *field + name.length);
        memcpy(field->name, name.data, name.length);
        field->node.key = field->name;
        field->node.key_length = name.length;
        field->value = text_new(value);
        hash->bytes += field_bytes(field);
        table_add(&hash->fields, &field->node);
    }
    hash->bytes += text_bytes(field->value);
    return is_new;
}

bool hash_remove(struct hash *hash, struct slice name) {
    struct field *field = hash_find(hash, name);
    if (!field)
        return false;
    table_remove(&hash->fields, &field->node);
    hash->bytes -= field_bytes(field) + text_bytes(field->value);
    free_field(&field->node, NULL);
    return true;
}
