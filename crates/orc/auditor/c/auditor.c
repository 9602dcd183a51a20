/*
 * The part of ORC that lives in unmodified programs: an auditor of the dynamic loader (rtld-audit(7), LD_AUDIT).
 *
 *     the loader                         the auditor
 *     ----------                         -----------
 *     looks for a library                la_objsearch: gives it the object to open, if that has a name (libraries.c);
 *                                                      makes room where that library always is (place.c)
 *     has mapped all it wants            la_activity:  puts shared objects in the place of other files (files.c)
 *                                                      and of what was relocated, equal by now (relocated.c)
 *
 * Where the store has given names to all that is needed (names.c) nobody is asked; else the store is (line.c).
 *
 * When a program starts the loader has relocated everything at that time. At a dlopen(3) it does so afterwards, and calls nobody:
 * what it relocates then follows with the next activity.
 *
 * What it cannot have stays as it is. It defines neither la_symbind nor any pltenter, so that calls between libraries cost what
 * they always cost. It has no C library: the loader gives auditors a namespace of their own, and a second C library there would
 * cost more memory than many programs have to share.
 *
 * It leaves alone:
 *   - pages that differ from the file (text relocations, patches, breakpoints);
 *   - programs that have filtered system calls (seccomp), unless ORRERY_ORC_SECCOMP=share says that sockets are allowed;
 *   - everything, where the store does not answer in time or belongs to somebody else.
 * ORRERY_ORC_VERBOSE=1 has it say so on standard error.
 */
#define _GNU_SOURCE
#include "parts.h"

#define EXPORT __attribute__((visibility("default")))

static int has_started;

EXPORT unsigned int la_version(unsigned int version) { return version < LAV_CURRENT ? version : LAV_CURRENT; }

EXPORT char *la_objsearch(const char *name, uintptr_t *cookie, unsigned int flag) {
    int is_path = 0;
    (void)cookie;
    for (const char *c = name; *c; c++)
        is_path |= *c == '/';
    /* A name as it was asked for is opened as it is only where it is a path. */
    if (flag == LA_SER_ORIG)
        begin_search();
    if (!is_path && flag == LA_SER_ORIG)
        return (char *)name;
    /* Before anything else, which takes longer. */
    if (has_started && flag == LA_SER_ORIG && leave_small(name))
        return (char *)name;
    return is_store_known() && !is_left_alone() ? (char *)find_library(name, flag != LA_SER_ORIG)
                                                : (char *)name;
}

EXPORT unsigned int la_objopen(struct link_map *map, Lmid_t space, uintptr_t *cookie) {
    (void)space;
    (void)cookie;
    note_map(map);
    int is_known = is_store_known();
    if (!has_started)
        note_static_tls(map);
    if (!is_known || !note_library(map))
        note_opened(map);
    /* No bindings are to be told of. */
    return 0;
}

EXPORT unsigned int la_objclose(uintptr_t *cookie) {
    /* A cookie that nobody changed is the object's map. */
    const struct link_map *map = (const struct link_map *)*cookie;
    forget_opened(map);
    forget_library(map);
    note_closed(map->l_addr);
    return 0;
}

EXPORT void la_activity(uintptr_t *cookie, unsigned int flag) {
    int is_done = flag == LA_ACT_CONSISTENT;
    int has_relocated = !is_done || !has_started;
    (void)cookie;
    if (!is_done)
        begin_work();
    if (is_done) {
        finish_libraries();
        finish_places();
    }
    int has_work = (is_done && opened_objects()) || (has_relocated && placed_count());
    if (has_work && may_share()) {
        if (is_done)
            share_files();
        if (has_relocated)
            share_relocated();
    }
    done_looking();
    if (is_done) {
        finish_names();
        end_work();
    }
    has_started |= is_done;
}
