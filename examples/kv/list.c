#include "list.h"

#include "memory.h"

#define SMALLEST 8

struct list *list_new(void) {
    struct list *list = memory_take(MEMORY_CONTENTS, sizeof *list);
    list->bytes = sizeof *list;
    return list;
}

void list_free(struct list *list) {
    while (list->count > 0)
        text_free(list_pop(list, true));
    memory_give(MEMORY_CONTENTS, list->slots, list->room * sizeof *list->slots);
    memory_give(MEMORY_CONTENTS, list, sizeof *list);
}

static size_t slot(const struct list *list, size_t index) { return (list->first + index) & (list->room - 1); }

static void resize(struct list *list, size_t room) {
    struct text **slots = memory_take(MEMORY_CONTENTS, room * sizeof *slots);
    for (size_t i = 0; i < list->count; i++)
        slots[i] = list->slots[slot(list, i)];
    memory_give(MEMORY_CONTENTS, list->slots, list->room * sizeof *slots);
    list->bytes += (room - list->room) * sizeof *slots;
    list->slots = slots;
    list->room = room;
    list->first = 0;
}

void list_push(struct list *list, bool left, struct slice bytes) {
    if (list->count == list->room)
        resize(list, list->room ? 2 * list->room : SMALLEST);
    struct text *text = text_new(bytes);
    if (left)
        list->first = slot(list, list->room - 1);
    list->slots[slot(list, left ? 0 : list->count)] = text;
    list->count++;
    list->bytes += text_bytes(text);
}

struct text *list_pop(struct list *list, bool left) {
    struct text *text = list->slots[slot(list, left ? 0 : list->count - 1)];
    if (left)
        list->first = slot(list, 1);
    list->count--;
    list->bytes -= text_bytes(text);
    if (list->room > SMALLEST && list->count < list->room / 4)
        resize(list, list->room / 2);
    return text;
}

const struct text *list_at(const struct list *list, size_t index) { return list->slots[slot(list, index)]; }
