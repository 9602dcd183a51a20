/*
 * Libraries that are loaded from objects. Where the loader looks for a library by its name, and tries a file whose object has a
 * name (names.c), it is given the object to open. It maps that in the place of the file, under the file's name: nothing is
 * exchanged afterwards, and no page is touched twice.
 *
 * The loader knows libraries by device and inode, too, so as not to load one twice that has two names. So all that is loaded
 * is known here: a file that is asked for again is answered as it was the first time; two files with the same bytes are two
 * libraries, of which only the first is loaded from the object; and what is asked for as a path keeps it, as $ORIGIN is
 * made of that (its segments are exchanged: files.c).
 */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/statfs.h>

#include "parts.h"

#define MOST_LIBRARIES 1024
/* Of what statfs tells: no code may be run from there (ST_NOEXEC). */
#define NOEXEC 8

/* A file that was loaded. */
struct library {
    uint64_t device, inode;
    const struct link_map *map;
    /* The inode of the object that it was loaded from, or 0, and what is known of the object. */
    uint64_t object;
    struct entry entry;
};

static struct library libraries[MOST_LIBRARIES];
static size_t count;
/* The last one is what the loader is about to map, if it does. */
static int is_pending;
/* The object that it is to open, and its inode. */
static int object = -1;
static uint64_t object_inode;
/* The file that it was to open, by its own name. */
static char file_path[PATH_LENGTH];
/* The mount from which code may be run, as was found since the loader began; 0 where none was. Most libraries are in one. */
static uint64_t good_mount;

static void close_object(void) {
    close_own(object, object_inode);
    object = -1;
}

static void settle(void) {
    count -= (size_t)is_pending;
    is_pending = 0;
    close_object();
}

static struct library *find(uint64_t device, uint64_t inode) {
    for (size_t i = 0; i < count; i++)
        if (libraries[i].device == device && libraries[i].inode == inode)
            return &libraries[i];
    return NULL;
}

static int is_loaded_from(uint64_t inode) {
    for (size_t i = 0; i < count; i++)
        if (libraries[i].object == inode)
            return 1;
    return 0;
}

/* Opens the object of an entry, to be looked into; its inode, or 0. Until the loader has opened it, too, it keeps its name. */
static uint64_t open_entry(const struct entry *entry) {
    object_inode = 0;
    object = open_object(entry, entry->value[0], &object_inode);
    return object_inode;
}

/* The loader could map no code of it, although its object is known by another mount of the same file system. */
static int is_noexec(const char *name, uint64_t mount) {
    struct statfs found;
    if (mount && mount == good_mount)
        return 0;
    if (CALL3(SYS_statfs, name, &found, 0) != 0)
        return 0;
    if (!(found.f_flags & NOEXEC))
        good_mount = mount;
    return found.f_flags & NOEXEC;
}

static const char *last_part(const char *name) {
    const char *part = name;
    for (; *name; name++)
        if (*name == '/')
            part = name + 1;
    return part;
}

/* Whether the object that the loader was to open has lost its name before it did: nobody had used it for long, or a store that
   found what another has left cleared all of it away. The loader then seeks the library elsewhere. */
static int is_missed(const char *name) {
    struct stat found;
    const char *wanted = last_part(file_path), *sought = last_part(name);
    size_t length = length_of(wanted) + 1;
    return is_pending && libraries[count - 1].object && length_of(sought) + 1 == length &&
           same(sought, wanted, length) && look_at_file(object_name(), &found) < 0;
}

const char *find_library(const char *name, int is_searched) {
    struct stat found;
    uint64_t mount;
    if (!may_share())
        return name;
    if (is_missed(name)) {
        settle();
        return file_path;
    }
    settle();
    if (look_at_mounted(name, &found, &mount) < 0)
        return name;
    struct library *known = find(found.st_dev, found.st_ino);
    if (known) {
        if (!known->object)
            return name;
        /* It is mapped here, and so keeps its name. */
        uint64_t inode = find_object(&known->entry, known->entry.value[0]);
        return inode == known->object ? object_name() : name;
    }
    if (count == MOST_LIBRARIES)
        return name;
    struct library *fresh = &libraries[count++];
    uint64_t inode = 0;
    int may_have_place = 1;
    fresh->object = 0;
    is_pending = 1;
    size_t length = length_of(name);
    if (is_searched && length < sizeof file_path &&
        find_file(&found, mount, 0, EXECUTABLE | LOADABLE, &fresh->entry) && !is_noexec(name, mount)) {
        may_have_place = !(fresh->entry.value[1] & UNPLACED);
        inode =
            may_have_place ? open_entry(&fresh->entry) : find_object(&fresh->entry, fresh->entry.value[0]);
        if (!inode || is_loaded_from(inode)) {
            close_object();
            inode = 0;
        }
    }
    fresh->device = found.st_dev;
    fresh->inode = found.st_ino;
    fresh->object = inode;
    fresh->map = NULL;
    if (may_have_place) {
        int fd = inode ? object : open_file(name);
        if (fd >= 0)
            prepare_place(fd, (uint64_t)found.st_size);
        if (!inode)
            close_file(fd);
    }
    if (!inode)
        return name;
    copy(file_path, name, length + 1);
    /* By its name: one in /proc would have to be made for this process. */
    return object_name();
}

int note_library(const struct link_map *map) {
    struct stat found;
    int is_object = 0;
    if (!may_share())
        return 0;
    if (is_pending) {
        libraries[count - 1].map = map;
        is_object = libraries[count - 1].object != 0;
        is_pending = 0;
        if (is_object)
            use_prepared(map, &libraries[count - 1].entry);
    } else if (map->l_name && map->l_name[0] == '/' && count < MOST_LIBRARIES &&
               look_at_file(map->l_name, &found) == 0) {
        /* The loader itself. */
        struct library *loader = &libraries[count++];
        loader->device = found.st_dev;
        loader->inode = found.st_ino;
        loader->object = 0;
        loader->map = map;
    }
    settle();
    return is_object;
}

void forget_library(const struct link_map *map) {
    settle();
    for (size_t i = 0; i < count; i++)
        if (libraries[i].map == map)
            libraries[i--] = libraries[--count];
}

void finish_libraries(void) {
    settle();
    /* It may be mounted otherwise when the loader begins again. */
    good_mount = 0;
}
