/*
 * Programs that cannot start under an auditor. With one the loader sets room for thread-local variables aside before it knows the
 * program's libraries. Those that have their variables at a fixed distance from the thread (initial exec, DF_STATIC_TLS in elf(5)) must fit
 * into it, or the program is not started. The libraries of sanitizers have up to 800 KiB of them, and all threads' stacks would
 * have to be so much larger. So a program that has such a library is executed again, without this auditor.
 *
 * That is done before any code of the program has run, so nothing is lost but the time that the loader took.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "parts.h"

/* Most segments of a library. */
#define MOST_HEADERS 32

/* What is set aside where glibc.rtld.optional_static_tls says nothing else. */
#define USUAL_ROOM 512UL

static const char OURS[] = "/liborrery-orc.so";
static const char AUDIT[] = "LD_AUDIT=";
static const char TUNABLES[] = "GLIBC_TUNABLES=";
static const char ROOM[] = "glibc.rtld.optional_static_tls=";

/* Bytes of such variables that the libraries have that were loaded so far. */
static size_t wanted;

static int begins_with(const char *text, const char *with) {
    size_t i = 0;
    while (with[i] && text[i] == with[i])
        i++;
    return !with[i];
}

static int is_static(const struct link_map *map) {
    for (const ElfW(Dyn) *entry = map->l_ld; entry && entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == DT_FLAGS && entry->d_un.d_val & DF_STATIC_TLS)
            return 1;
    return 0;
}

/* The size of a library's thread-local variables, as its file has it: what is at its address may begin elsewhere. */
static size_t size_of_variables(const char *path) {
    ElfW(Ehdr) header;
    ElfW(Phdr) segments[MOST_HEADERS];
    size_t size = 0;
    int fd = open_file(path);
    if (fd < 0)
        return 0;
    if (CALL6(SYS_pread64, fd, &header, sizeof header, 0, 0, 0) == (long)sizeof header &&
        header.e_phentsize == sizeof *segments && header.e_phnum <= MOST_HEADERS) {
        size_t length = header.e_phnum * sizeof *segments;
        if (CALL6(SYS_pread64, fd, segments, length, header.e_phoff, 0, 0) == (long)length)
            for (size_t i = 0; i < header.e_phnum; i++)
                if (segments[i].p_type == PT_TLS)
                    size = segments[i].p_memsz;
    }
    close_file(fd);
    return size;
}

/* The room that is set aside, as the environment has it. */
static size_t room_in(const char *const *environment) {
    for (; *environment; environment++) {
        if (!begins_with(*environment, TUNABLES))
            continue;
        for (const char *c = *environment; *c; c++) {
            size_t room = 0;
            if (!begins_with(c, ROOM))
                continue;
            for (c += sizeof ROOM - 1; *c >= '0' && *c <= '9'; c++)
                room = room * 10 + (size_t)(*c - '0');
            return room;
        }
    }
    return USUAL_ROOM;
}

static int is_ours(const char *name, size_t length) {
    size_t ours = sizeof OURS - 1;
    return length >= ours && same(name + length - ours, OURS, ours);
}

/* Copies the list of auditors without this one; its length, or 0 where no other is left. */
static size_t copy_others(char *to, const char *list) {
    size_t written = sizeof AUDIT - 1;
    copy(to, AUDIT, written);
    for (list += sizeof AUDIT - 1; *list;) {
        size_t length = 0;
        while (list[length] && list[length] != ':')
            length++;
        if (length && !is_ours(list, length)) {
            if (written > sizeof AUDIT - 1)
                to[written++] = ':';
            copy(to + written, list, length);
            written += length;
        }
        list += length + (list[length] == ':');
    }
    to[written] = 0;
    return written > sizeof AUDIT - 1 ? written : 0;
}

/* Executes the program again without this auditor; returns only where that cannot be done. */
static void execute_again(const char *const *arguments, const char *const *environment) {
    size_t count = 0, room = 0, kept = 0;
    for (; environment[count]; count++)
        if (begins_with(environment[count], AUDIT))
            room += length_of(environment[count]) + 1;
    room += (count + 1) * sizeof *environment;
    long place = CALL6(SYS_mmap, NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (has_failed(place))
        return;
    const char **without = (const char **)place;
    char *text = (char *)(without + count + 1);
    for (size_t i = 0; i < count; i++) {
        if (!begins_with(environment[i], AUDIT)) {
            without[kept++] = environment[i];
            continue;
        }
        size_t length = copy_others(text, environment[i]);
        if (length) {
            without[kept++] = text;
            text += length + 1;
        }
    }
    without[kept] = NULL;
    if (program_path())
        CALL3(SYS_execve, program_path(), arguments, without);
    /* It may be known by a descriptor only that was closed. */
    CALL3(SYS_execve, "/proc/self/exe", arguments, without);
    CALL3(SYS_munmap, place, room, 0);
}

void note_static_tls(const struct link_map *map) {
    const char *const *environment, *const *arguments;
    if (!map->l_name || map->l_name[0] != '/' || !is_static(map))
        return;
    wanted += size_of_variables(map->l_name);
    /* Less than is usual fits in any case. */
    if (wanted <= USUAL_ROOM)
        return;
    environment = program_environment(&arguments);
    if (!environment || wanted <= room_in(environment))
        return;
    say("the program is left alone: this library has too many thread-local variables", map->l_name);
    execute_again(arguments, environment);
}
