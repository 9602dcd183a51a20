/*
 * Libraries that are loaded from objects. Where the loader looks for a library by its name, and tries a file whose object has a
 * name (names.c), it is given the object to open. It maps that in the place of the file, under the file's name: nothing is
 * exchanged afterwards, and no page is touched twice.
 *
 * What is asked for as a path the loader opens under that path, which is then the library's name, and $ORIGIN is made of it. There it is
 * given the object, too, by a descriptor of it, and name and origin are those of the file again as soon as it has mapped the object
 * (origin.c). Where that is not possible, or another auditor would hear of it, the file is mapped, and its segments are exchanged
 * (files.c).
 *
 * The loader knows libraries by device and inode, too, so as not to load one twice that has two names. So all that is loaded
 * is known here: a file that is asked for again is answered as it was the first time; and two files with the same bytes are two
 * libraries, of which only the first is loaded from the object.
 */
#define _GNU_SOURCE
#include <sys/stat.h>
#include <sys/statfs.h>

#include "parts.h"

#define MOST_LIBRARIES 1024
/* Of what statfs tells: no code may be run from there (ST_NOEXEC). */
#define NOEXEC 8
/* Bytes of a library that is loaded by its path while the program runs, up to which it is left alone: to share it takes 20 us, half as
   long as to load it, and there are few and short ones. */
#define SMALL (32L << 10)

/* A file that was loaded. */
struct library {
    uint64_t device, inode;
    /* Of the path that the loader knows it by; 0 where it knows none. */
    uint64_t path;
    const struct link_map *map;
    /* The inode of the object that it was loaded from, or 0, and what is known of the object. */
    uint64_t object;
    struct entry entry;
};

static struct library libraries[MOST_LIBRARIES];
static size_t count;
/* There were more than there is room for: what is loaded is not known any more. */
static int has_missed;
/* The last one is what the loader is about to map, if it does; it may have been asked for as a path, and be too small. */
static int is_pending, is_pending_path, is_pending_small;
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
    is_pending = is_pending_path = is_pending_small = 0;
    close_object();
}

static struct library *find(uint64_t device, uint64_t inode) {
    for (size_t i = 0; i < count; i++)
        if (libraries[i].device == device && libraries[i].inode == inode)
            return &libraries[i];
    return NULL;
}

static uint64_t hash_of(const char *path) {
    uint64_t hash = 1;
    for (; *path; path++)
        hash = mix(hash, (unsigned char)*path);
    return hash ? hash : 1;
}

/* Whether the loader has a library of this path, and will find it by that, whatever is there now. */
static int is_path_loaded(const char *path) {
    uint64_t hash = hash_of(path);
    for (size_t i = 0; i < count; i++)
        if (libraries[i].path == hash && libraries[i].map)
            return 1;
    return 0;
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
    return is_pending && !is_pending_path && libraries[count - 1].object && length_of(sought) + 1 == length &&
           same(sought, wanted, length) && look_at_file(object_name(), &found) < 0;
}

/* Any library that was loaded under its own path. */
static const struct link_map *ordinary_library(void) {
    for (size_t i = 0; i < count; i++)
        if (libraries[i].path && libraries[i].map)
            return libraries[i].map;
    return NULL;
}

/* Whether the loader may be given another path in place of this one, which is asked for as it is. */
static int may_replace_path(const char *name) {
    for (const char *c = name; *c; c++)
        if (*c == '$')
            return 0;
    return name[0] == '/' && !has_missed && !has_other_auditors() && find_origin(ordinary_library());
}

/* Notes the file that the loader is about to load, if there is room. */
static struct library *begin_library(uint64_t device, uint64_t inode) {
    has_missed |= count == MOST_LIBRARIES;
    if (count == MOST_LIBRARIES)
        return NULL;
    struct library *fresh = &libraries[count++];
    fresh->device = device;
    fresh->inode = inode;
    fresh->path = 0;
    fresh->map = NULL;
    fresh->object = 0;
    fresh->entry.value[1] = 0;
    is_pending = 1;
    return fresh;
}

int leave_small(const char *name) {
    struct stat found;
    settle();
    if (look_at_file(name, &found) < 0 || found.st_size > SMALL || find(found.st_dev, found.st_ino) ||
        !begin_library(found.st_dev, found.st_ino))
        return 0;
    say("left alone: it is small", name);
    return is_pending_small = 1;
}

/* Finds the object of a file that is about to be loaded; its inode, or 0. It stays open where it has to be looked into, or is given by
   its descriptor. */
static uint64_t find_its_object(const char *name, const struct stat *found, uint64_t mount,
                                struct entry *entry) {
    uint64_t inode = 0;
    if (!find_file(found, mount, 0, EXECUTABLE | LOADABLE, entry) || is_noexec(name, mount))
        return 0;
    inode = is_pending_path || !(entry->value[1] & UNPLACED) ? open_entry(entry)
                                                             : find_object(entry, entry->value[0]);
    if (inode && !is_loaded_from(inode))
        return inode;
    close_object();
    return 0;
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
    if (!is_searched && is_path_loaded(name))
        return name;
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
    struct library *fresh = begin_library(found.st_dev, found.st_ino);
    uint64_t inode = 0;
    size_t length = length_of(name);
    if (!fresh)
        return name;
    is_pending_path = !is_searched;
    if (length < sizeof file_path && (is_searched || may_replace_path(name)))
        inode = find_its_object(name, &found, mount, &fresh->entry);
    if (inode && is_pending_path && !replace_path(name, object, inode)) {
        close_object();
        inode = 0;
    }
    fresh->object = inode;
    if (!(fresh->entry.value[1] & UNPLACED) && may_have_place((uint64_t)found.st_size)) {
        int fd = inode ? object : open_file(name);
        if (fd >= 0)
            prepare_place(fd, (uint64_t)found.st_size);
        if (!inode)
            close_file(fd);
    }
    if (!inode)
        return name;
    if (is_pending_path)
        return replacing_path();
    copy(file_path, name, length + 1);
    /* By its name: one in /proc would have to be made for this process. */
    return object_name();
}

int note_library(const struct link_map *map) {
    struct stat found;
    int is_object = 0;
    if (is_pending) {
        libraries[count - 1].map = map;
        libraries[count - 1].path = map->l_name && map->l_name[0] == '/' ? hash_of(map->l_name) : 0;
    }
    if (is_pending_small) {
        is_pending = 0;
        settle();
        return 1;
    }
    if (!may_share())
        return 0;
    if (is_pending) {
        is_object = libraries[count - 1].object != 0;
        if (is_object && is_pending_path) {
            restore_path(map);
            libraries[count - 1].path = hash_of(map->l_name);
        }
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
        loader->path = 0;
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
