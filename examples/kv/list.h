/* Lists: rings of strings. */
#ifndef KV_LIST_H
#define KV_LIST_H

#include "text.h"

struct list {
    struct text **slots;
    size_t room;
    size_t first;
    size_t count;
    size_t bytes; /* all that it takes up */
};

struct list *list_new(void);
void list_free(struct list *list);
void list_push(struct list *list, bool left, struct slice bytes);

/* The element at an end, which is the caller's then. The list is not empty. */
struct text *list_pop(struct list *list, bool left);

const struct text *list_at(const struct list *list, size_t index);

#endif
