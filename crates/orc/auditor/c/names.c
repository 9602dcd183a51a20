/*
 * What is known without asking. The store keeps an index for each trust domain, beside its socket, which says under what name the
 * object of a file, or of relocated data, is to be had (index.rs, shelf.rs). So where the
 * store knows all that a program loads, the program starts without a word to it, and no other process has to wake up.
 *
 * What is written there is a hint. An object is what it is because nobody can change it, which is looked at each time.
 */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/un.h>

#include "parts.h"

#define SLOT_FULL 1

/* As in index.rs; the slots follow. */
struct index {
    char magic[8];
    uint64_t slots, start, end;
    char base[480];
};

/* What is known of the index, and a descriptor of it as long as the loader is at work: a few reads cost less than a mapping. */
static struct index names;
static int has_looked, has_index;
static int file = -1;
static uint64_t file_inode;
static char index_path[PATH_LENGTH];
/* The directory of the objects, with room for a name. */
static char folder[PATH_LENGTH];
static size_t folder_length;

static size_t append(char *to, size_t at, const char *text) {
    size_t length = length_of(text);
    if (at + length + 1 > PATH_LENGTH)
        return PATH_LENGTH;
    copy(to + at, text, length + 1);
    return at + length;
}

/* Writes the directory of whoever may be meant, a user or all; whether there is room. */
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

/* Opens the index, if it is the store's: it and the directories to it are, where others than the superuser or this user
   cannot have written it. */
static int open_index(void) {
    struct stat found;
    copy(index_path, folder, folder_length + 1);
    if (append(index_path, folder_length, "index") == PATH_LENGTH || (file = open_file(index_path)) < 0)
        return 0;
    if (CALL3(SYS_fstat, file, &found, 0) == 0 && (found.st_mode & S_IFMT) == S_IFREG &&
        !(found.st_mode & 022) && (found.st_uid == 0 || found.st_uid == (uid_t)CALL3(SYS_geteuid, 0, 0, 0)) &&
        CALL6(SYS_pread64, file, &names, sizeof names, 0, 0, 0) == (long)sizeof names &&
        same(names.magic, "ORCINDX1", 8) && names.slots) {
        file_inode = found.st_ino;
        return 1;
    }
    close_file(file);
    file = -1;
    return 0;
}

/* Whether there is an index, ready to be read. */
static int is_ready(void) {
    char number[24];
    if (has_looked && (!has_index || file >= 0))
        return has_index;
    if (has_looked) {
        struct stat found;
        file = open_file(index_path);
        if (file < 0 || CALL3(SYS_fstat, file, &found, 0) != 0)
            return 0;
        file_inode = found.st_ino;
        if ((uint64_t)found.st_size == sizeof names + names.slots * sizeof(struct entry))
            return 1;
        /* It has grown, so another file has its name. */
        close_file(file);
        file = -1;
    }
    has_looked = 1;
    if (!is_store_known())
        return 0;
    /* A user's, or else a tenant's, whose directory has one for all. */
    has_index = (write_folder(decimal((unsigned long)CALL3(SYS_geteuid, 0, 0, 0), number)) && open_index()) ||
                (write_folder("all") && open_index());
    names.base[sizeof names.base - 1] = 0;
    if (has_index && names.base[0] == '/') {
        folder_length = append(folder, append(folder, 0, names.base), "/");
        has_index = folder_length < PATH_LENGTH;
    }
    return has_index;
}

void finish_names(void) {
    close_own(file, file_inode);
    file = -1;
    /* The first program of a trust domain finds none at first. */
    has_looked &= has_index;
}

uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

int find_entry(const uint64_t key[KEY_WORDS], struct entry *entry) {
    uint64_t hash = 1;
    if (!is_ready())
        return 0;
    for (size_t i = 0; i < KEY_WORDS; i++)
        hash = mix(hash, key[i]);
    for (uint64_t i = 0; i < names.slots; i++) {
        /* The state is the first word, and the last that was written. */
        uint64_t at = sizeof names + (hash + i) % names.slots * sizeof *entry;
        if (CALL6(SYS_pread64, file, entry, sizeof *entry, at, 0, 0) != (long)sizeof *entry || !entry->state)
            return 0;
        if (entry->state == SLOT_FULL && same(entry->key, key, sizeof entry->key)) {
            entry->name[sizeof entry->name - 1] = 0;
            return 1;
        }
    }
    return 0;
}

int find_file(const struct stat *found, uint64_t mount, uint64_t end, uint64_t flags, struct entry *entry) {
    uint64_t key[KEY_WORDS] = {
        KEY_FILE,
        found->st_dev,
        found->st_ino,
        (uint64_t)found->st_size,
        (uint64_t)found->st_mtim.tv_sec * 1000000000u + (uint64_t)found->st_mtim.tv_nsec,
        (uint64_t)found->st_ctim.tv_sec * 1000000000u + (uint64_t)found->st_ctim.tv_nsec,
        mount,
    };
    return find_entry(key, entry) && entry->value[0] >= end && (entry->value[1] & flags) == flags;
}

/* Writes the path of an entry's object; whether it has one. */
static int write_name(const struct entry *entry) {
    for (const char *c = entry->name; *c; c++)
        if (*c == '/')
            return 0;
    return entry->name[0] && append(folder, folder_length, entry->name) != PATH_LENGTH;
}

uint64_t find_object(const struct entry *entry, uint64_t end) {
    uint64_t inode;
    return write_name(entry) && is_immutable(folder, end, &inode) ? inode : 0;
}

int open_object(const struct entry *entry, uint64_t end, uint64_t *inode) {
    int fd = write_name(entry) ? open_file(folder) : -1;
    if (fd >= 0 && !is_sealed(fd, end, inode)) {
        close_file(fd);
        return -1;
    }
    return fd;
}

const char *object_name(void) { return folder; }

struct range span_of_places(void) {
    return has_index ? (struct range){names.start, names.end} : (struct range){0, 0};
}
