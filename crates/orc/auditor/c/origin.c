/*
 * What the loader knows of a library's path. A library that is asked for as a path (dlopen(3)) is opened by it, and the path is also its
 * name, in the loader's list of libraries, and of its directory $ORIGIN is made. Where the loader is given an object in place of
 * the file both would be the object's. So they are written over with the file's when the loader has mapped the object, and before it
 * does anything else with the library: in place, as it is the loader's memory, for which the replacement is made as long as the path.
 *
 * Where the loader has a library's name is public (<link.h>), where it has the directory is not: it is looked for once in each
 * process, in what it keeps of a library whose directory is known, and nothing is replaced where it is not found. It is written over only
 * where it is the replacement's.
 *
 * The replacement is a descriptor's name in /proc: so the object is there even where a new store has just removed it. The loader would
 * report an error if it were not.
 */
#define _GNU_SOURCE
#include <sys/stat.h>

#include "parts.h"

/* Where in a map the directory may be: behind what is public, and in what every version of the loader has. */
#define FIRST_OFFSET sizeof(struct link_map)
#define LAST_OFFSET 1016UL
/* Both were allocated for the library, so one is not far from the other. */
#define NEAR (1UL << 20)
/* Allocated memory begins at a multiple of this. */
#define ALIGNED 16UL
/* How often it is looked for in vain. */
#define ATTEMPTS 3

/* A thread may have descriptors of its own (CLONE_FILES in clone(2)). The process's, which are the first thread's, serve where the path is too
   short for the thread's. */
static const char OF_THREAD[] = "/proc/thread-self/fd/", OF_PROCESS[] = "/proc/self/fd/";

/* Where in a map the pointer to the directory is; 0 where that is not known. */
static size_t offset;
static int attempts;
/* What was replaced last, and by what. */
static char original[PATH_LENGTH], replacement[PATH_LENGTH];

static char *string_at(const struct link_map *map, size_t at) {
    return *(char *const *)((const char *)map + at);
}

/* How long the directory of an absolute path is, as the loader has it. */
static size_t length_of_directory(const char *path) {
    size_t length = length_of(path);
    while (length > 0 && path[length] != '/')
        length--;
    return length ? length : 1;
}

/* Whether this is a string, and the directory of an absolute path. What it is is not known before the kernel has read it; a path that is
   not absolute it does not look up, as there is no directory to begin with. */
static int is_directory_of(const char *string, const char *path) {
    struct stat found;
    size_t length = length_of_directory(path);
    return CALL6(SYS_newfstatat, -1, string, &found, 0, 0, 0) == 0 && same(string, path, length) &&
           !string[length];
}

int find_origin(const struct link_map *map) {
    size_t match = 0;
    if (offset || !map || attempts == ATTEMPTS)
        return offset != 0;
    attempts++;
    for (size_t at = FIRST_OFFSET; at <= LAST_OFFSET; at += sizeof(char *)) {
        const char *string = string_at(map, at);
        uintptr_t from = (uintptr_t)map, to = (uintptr_t)string;
        if (to % ALIGNED || (to > from ? to - from : from - to) > NEAR ||
            !is_directory_of(string, map->l_name))
            continue;
        if (match) {
            attempts = ATTEMPTS;
            return 0;
        }
        match = at;
    }
    offset = match;
    return offset != 0;
}

int replace_path(const char *name, int fd, uint64_t inode) {
    struct stat found;
    char digits[12];
    size_t count = 0, at = 0, length = length_of(name);
    copy(original, name, length + 1);
    do
        digits[count++] = (char)('0' + fd % 10);
    while (fd /= 10);
    const int is_threads = length >= sizeof OF_THREAD - 1 + count;
    const char *descriptors = is_threads ? OF_THREAD : OF_PROCESS;
    size_t before = is_threads ? sizeof OF_THREAD - 1 : sizeof OF_PROCESS - 1;
    /* As long as the path, so that that fits in its place. */
    while (at + before + count < length)
        replacement[at++] = '/';
    copy(replacement + at, descriptors, before);
    at += before;
    while (count)
        replacement[at++] = digits[--count];
    replacement[at] = 0;
    /* There may be no /proc, or another thread's descriptors in it. */
    return (is_threads && has_read_thread()) ||
           (look_at_file(replacement, &found) == 0 && found.st_ino == inode);
}

const char *replacing_path(void) { return replacement; }

void restore_path(const struct link_map *map) {
    size_t length = length_of(replacement);
    if (!map->l_name || !same(map->l_name, replacement, length + 1))
        return;
    char *directory = string_at(map, offset);
    size_t old = length_of_directory(replacement), new = length_of_directory(original);
    if (directory && same(directory, replacement, old) && !directory[old]) {
        copy(directory, original, new);
        directory[new] = 0;
    }
    copy(map->l_name, original, length_of(original) + 1);
}
