/*
 * What the kernel has put on the stack for the program (execve(2)): there is its environment as it was then, and behind that
 * what it was started by (getauxval(3)). Reading it takes no system call, and no entry in /proc, which the kernel makes again for each
 * process that looks: such an entry costs 10 us, until the process has ended and it is gone.
 *
 * The loader knows where that is and says so under a name that programs may use, too (__libc_stack_end). An auditor is linked
 * with nothing, so it looks the name up by itself, in the tables that the loader's own map tells of (elf(5)).
 */
#define _GNU_SOURCE
#include "parts.h"

static const char WANTED[] = "__libc_stack_end";
/* More than the kernel lets a program have. */
#define MOST_ARGUMENTS (1L << 24)

/* Tables of one object. */
struct tables {
    const uint32_t *hash;
    const ElfW(Sym) * symbols;
    const char *strings;
};

/* An address of the dynamic section, which some objects have as it is in the file. */
static const void *settled(const struct link_map *map, ElfW(Addr) address) {
    return (const void *)(address < map->l_addr ? address + map->l_addr : address);
}

static int find_tables(const struct link_map *map, struct tables *tables) {
    *tables = (struct tables){0};
    for (const ElfW(Dyn) *entry = map->l_ld; entry && entry->d_tag != DT_NULL; entry++) {
        const void *address = settled(map, entry->d_un.d_ptr);
        if (entry->d_tag == DT_GNU_HASH)
            tables->hash = address;
        else if (entry->d_tag == DT_SYMTAB)
            tables->symbols = address;
        else if (entry->d_tag == DT_STRTAB)
            tables->strings = address;
    }
    return tables->hash && tables->symbols && tables->strings;
}

/* Where an object has the wanted variable; NULL where it has none. The hash table: numbers of buckets, of the first symbol, of the
   filter's words, a shift; the filter, the buckets, and the symbols' hashes, of which the last of each bucket is odd. */
static const void *find_wanted(const struct link_map *map) {
    struct tables tables;
    uint32_t wanted = 5381;
    if (!find_tables(map, &tables))
        return NULL;
    for (const char *c = WANTED; *c; c++)
        wanted = wanted * 33 + (unsigned char)*c;
    const uint32_t *buckets = tables.hash + 4 + tables.hash[2] * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *hashes = buckets + tables.hash[0];
    uint32_t symbol = tables.hash[0] ? buckets[wanted % tables.hash[0]] : 0;
    if (symbol < tables.hash[1])
        return NULL;
    for (;; symbol++) {
        uint32_t hash = hashes[symbol - tables.hash[1]];
        const ElfW(Sym) *found = &tables.symbols[symbol];
        if ((hash | 1) == (wanted | 1) && found->st_shndx != SHN_UNDEF &&
            same(tables.strings + found->st_name, WANTED, sizeof WANTED))
            return (const void *)(map->l_addr + found->st_value);
        if (hash & 1)
            return NULL;
    }
}

const char *const *find_environment(const struct link_map *map, const char *const **arguments) {
    const void *variable = NULL;
    for (; map && !variable; map = map->l_next)
        variable = find_wanted(map);
    const long *stack = variable ? *(const long *const *)variable : NULL;
    /* The number of arguments, these, and nothing; the environment, and nothing. */
    if (!stack || stack[0] < 0 || stack[0] > MOST_ARGUMENTS || stack[1 + stack[0]])
        return NULL;
    *arguments = (const char *const *)(stack + 1);
    return (const char *const *)(stack + 2 + stack[0]);
}

const char *find_program(const char *const *environment) {
    while (environment && *environment)
        environment++;
    const ElfW(auxv_t) *entry = environment ? (const void *)(environment + 1) : NULL;
    for (; entry && entry->a_type != AT_NULL; entry++)
        if (entry->a_type == AT_EXECFN)
            return (const char *)entry->a_un.a_val;
    return NULL;
}
