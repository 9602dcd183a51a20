/*
 * Relocated data that the store has made before (prepared.rs). A library that is in its place needs none of the addresses in
 * the first pages of its read-only data computed again: the store has done that once, from the library's own bytes. So before the
 * loader relocates anything these pages are put over those of the library's object, and its table of relocations is made to begin
 * behind those that are done. The loader then never touches the pages, and they stay one for all processes.
 *
 * The store verified that the relocations at the beginning of the table are just these. It is trusted with this as it is with
 * the library's code.
 */
#define _GNU_SOURCE
#include <sys/mman.h>

#include "parts.h"

/* The number in an object's name that its library's data are known by: the first half of the hash that ends it. */
static uint64_t tag_of(const char *name) {
    size_t length = length_of(name);
    uint64_t tag = 0;
    for (size_t i = 0; length >= 32 && i < 16; i++) {
        char c = name[length - 32 + i];
        tag = tag << 4 | (uint64_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return tag;
}

int open_prepared(const struct placed *place, uint64_t tag, struct entry *entry) {
    uint64_t key[KEY_WORDS] = {KEY_PREPARED, place->name.key, place->name.address, place->name.start};
    if (!find_entry(key, entry) || (tag && entry->value[2] != tag))
        return -1;
    uint64_t length = entry->value[0];
    return length % PAGE || length > place->length ? -1 : open_object(entry, length, NULL);
}

/* What the loader knows of a library's relocations, which it reads again when it comes to them. */
struct table {
    ElfW(Dyn) * start, *size, *count;
};

static int find_table(const struct link_map *map, struct table *table) {
    *table = (struct table){0};
    for (ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
        if (entry->d_tag == DT_RELA)
            table->start = entry;
        else if (entry->d_tag == DT_RELASZ)
            table->size = entry;
        else if (entry->d_tag == DT_RELACOUNT)
            table->count = entry;
    }
    return table->start && table->size && table->count;
}

void use_prepared(const struct link_map *map, const struct entry *object) {
    struct placed *place = placed_count() ? placed_at(placed_count() - 1) : NULL;
    struct entry entry;
    struct table table;
    if (!place || place->name.address != map->l_addr)
        return;
    int fd = open_prepared(place, tag_of(object->name), &entry);
    if (fd < 0)
        return;
    uint64_t length = entry.value[0], done = entry.value[1];
    /* The loader has changed the dynamic section, which must stay. */
    if ((uintptr_t)map->l_ld >= place->start + length && find_table(map, &table) &&
        table.count->d_un.d_val >= done && table.size->d_un.d_val >= done * sizeof(ElfW(Rela)) &&
        CALL6(SYS_mmap, place->start, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, fd, 0) ==
            (long)place->start) {
        table.start->d_un.d_ptr += done * sizeof(ElfW(Rela));
        table.size->d_un.d_val -= done * sizeof(ElfW(Rela));
        table.count->d_un.d_val -= done;
        place->is_prepared = 1;
    }
    close_file(fd);
}
