/*
 * What is known without asking. The store keeps an index for each trust domain, beside its socket, which says under what name the
 * object of a file, or of relocated data, is to be had (index.rs, shelf.rs). A program maps it once. So where the store knows
 * all that a program loads, the program starts without a word to it, and no other process has to wake up.
 *
 * What is written there is a hint. An object is what it is because nobody can change it, which is looked at each time.
 */
#define _GNU_SOURCE
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "parts.h"

#define SLOT_FULL 1
#define NAME_LENGTH 160

/* As in index.rs. */
struct entry {
    uint64_t state, key[KEY_WORDS], value[3];
    char name[NAME_LENGTH];
};

struct index {
    char magic[8];
    uint64_t slots, start, end;
    char base[480];
    struct entry slot[];
};

static const struct index *names;
static int has_looked;
/* The folder of the objects, with room for a name. */
static char folder[PATH_LENGTH];
static size_t folder_length;

static size_t append(char *to, size_t at, const char *text) {
    size_t length = length_of(text);
    if (at + length + 1 > PATH_LENGTH)
        return PATH_LENGTH;
    copy(to + at, text, length + 1);
    return at + length;
}

/* Writes the folder of whoever may be meant, a user or all; whether there is room. */
static int write_folder(const char *who) {
    size_t at = append(folder, 0, store_folder());
    at = append(folder, at, "/objects/");
    at = append(folder, at, who);
    folder_length = append(folder, at, "/");
    return folder_length < PATH_LENGTH;
}

static const char *decimal(unsigned long number, char text[24]) {
    size_t at = 23;
    text[at] = 0;
    do
        text[--at] = (char)('0' + number % 10);
    while (number /= 10);
    return text + at;
}

/* Maps the index, if it is the store's: it and the folders to it are, where others than the superuser or this user
   cannot have written it. */
static const struct index *map_index(void) {
    char path[PATH_LENGTH];
    struct stat found;
    const struct index *mapped = NULL;
    copy(path, folder, folder_length + 1);
    if (append(path, folder_length, "index") == PATH_LENGTH)
        return NULL;
    int fd = open_file(path);
    if (fd < 0)
        return NULL;
    if (CALL3(SYS_fstat, fd, &found, 0) == 0 && (found.st_mode & S_IFMT) == S_IFREG &&
        !(found.st_mode & 022) && (found.st_uid == 0 || found.st_uid == (uid_t)CALL3(SYS_geteuid, 0, 0, 0)) &&
        (size_t)found.st_size > sizeof *mapped) {
        long at = CALL6(SYS_mmap, NULL, found.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (!has_failed(at))
            mapped = (const struct index *)at;
        if (mapped && (!same(mapped->magic, "ORCINDX1", 8) || !mapped->slots ||
                       mapped->slots > ((size_t)found.st_size - sizeof *mapped) / sizeof(struct entry))) {
            CALL3(SYS_munmap, at, found.st_size, 0);
            mapped = NULL;
        }
    }
    close_file(fd);
    return mapped;
}

static const struct index *index_of_names(void) {
    char number[24];
    if (has_looked)
        return names;
    has_looked = 1;
    if (!is_store_known())
        return NULL;
    /* A user's, or else a tenant's, whose folder has one for all. */
    if (write_folder(decimal((unsigned long)CALL3(SYS_geteuid, 0, 0, 0), number)))
        names = map_index();
    if (!names && write_folder("all"))
        names = map_index();
    if (names && names->base[0] == '/') {
        folder_length = append(folder, append(folder, 0, names->base), "/");
        if (folder_length == PATH_LENGTH)
            names = NULL;
    }
    return names;
}

uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

const struct entry *find_entry(const uint64_t key[KEY_WORDS]) {
    const struct index *known = index_of_names();
    uint64_t hash = 1;
    for (size_t i = 0; i < KEY_WORDS; i++)
        hash = mix(hash, key[i]);
    for (uint64_t i = 0; known && i < known->slots; i++) {
        const struct entry *entry = &known->slot[(hash + i) % known->slots];
        uint64_t state = __atomic_load_n(&entry->state, __ATOMIC_ACQUIRE);
        if (!state)
            return NULL;
        if (state == SLOT_FULL && same(entry->key, key, sizeof entry->key))
            return entry;
    }
    return NULL;
}

uint64_t value_of(const struct entry *entry) { return entry->value[0]; }

const struct entry *find_file(const struct stat *found, uint64_t end, uint64_t flags) {
    uint64_t key[KEY_WORDS] = {
        KEY_FILE,
        found->st_dev,
        found->st_ino,
        (uint64_t)found->st_size,
        (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec,
        (uint64_t)found->st_ctim.tv_sec * 1000000000u + (uint64_t)found->st_ctim.tv_nsec,
    };
    const struct entry *entry = find_entry(key);
    return entry && entry->value[0] >= end && (entry->value[1] & flags) == flags ? entry : NULL;
}

int open_object(const struct entry *entry, uint64_t end) {
    char name[NAME_LENGTH];
    copy(name, entry->name, sizeof name);
    name[sizeof name - 1] = 0;
    for (const char *c = name; *c; c++)
        if (*c == '/')
            return -1;
    if (!name[0] || append(folder, folder_length, name) == PATH_LENGTH)
        return -1;
    int fd = open_file(folder);
    if (fd >= 0 && !is_sealed(fd, end)) {
        close_file(fd);
        return -1;
    }
    return fd;
}

struct range span_of_places(void) {
    const struct index *known = index_of_names();
    return known ? (struct range){known->start, known->end} : (struct range){0, 0};
}
