/* What the parts of the auditor have of one another. */
#ifndef ORRERY_AUDITOR_PARTS_H
#define ORRERY_AUDITOR_PARTS_H

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>

#include "system.h"

#define PAGE 4096UL
#define HUGE (2UL << 20)
/* Most pieces in one message, as in protocol.rs. */
#define MOST_PIECES 64
/* Room for the path of an object. */
#define PATH_LENGTH 768

/* A range of addresses. */
struct range {
    uintptr_t start, end;
};

/* ---- start.c: what the kernel has told the program ---- */

/* The environment as it was when the program started, and its arguments, found by one of the loader's maps; NULL where the loader does not tell. */
const char *const *find_environment(const struct link_map *map, const char *const **arguments);
/* The path by which the program was started, which stands behind its environment; NULL where there is none. */
const char *find_program(const char *const *environment);

/* ---- environment.c: what the program was told, and what it may do ---- */

/* The loader has a map: the first is the program's, and is told of before anything is asked. */
void note_map(const struct link_map *map);

/* Whether there is anything to do in this process, at this time. Filters of system calls are looked for once for each piece of
   work of the loader's: when it begins, or searches without having begun, as dlopen(3) does first. */
int may_share(void);
void begin_work(void);
void begin_search(void);
void end_work(void);
/* Whether /proc/thread-self of this thread was read since that began. */
int has_read_thread(void);
/* Whether nothing is to be done any more, as far as that is known. */
int is_left_alone(void);
/* Whether libraries are to be where the kernel puts them. */
int is_without_places(void);
/* Whether the program has auditors beside this one, which hear what the loader is given. */
int has_other_auditors(void);
/* Whether to do as on kernels without recent calls, which tests ask for. */
int is_old_kernel(void);
/* Leaves everything alone from here, and says why. */
void give_up(const char *why);
/* Says something on standard error, where that is wanted. */
void say(const char *what, const char *name);
/* Whether the program was told of a store. */
int is_store_known(void);
/* The path by which the program was started, as it was given; NULL where that is not known. */
const char *program_path(void);
/* The program's environment and arguments as it was started with them; NULL where they are not known. */
const char *const *program_environment(const char *const **arguments);
/* The store's directory, and the address of the socket in it. */
const char *store_folder(void);
const struct sockaddr_un *store_address(void);

int open_file(const char *path);
struct stat;
/* What there is under a name; negative where there is nothing. */
long look_at_file(const char *path, struct stat *found);
/* The same of a file's number, size and times, with the number of the mount that it is reached by; 0 where that is not known. */
long look_at_mounted(const char *path, struct stat *found, uint64_t *mount);
void close_file(int fd);
/* Closes what stayed open from one call of the loader to the next, if it is still what it was: a program may have closed all
   that it did not know, and opened something else. */
void close_own(int fd, uint64_t inode);

/* ---- line.c: the connection to the store, and its language (protocol.rs) ---- */

#define EXECUTABLE 1u
enum request { ASK_FILES = 4, ASK_BOOK = 6, ASK_RECALL = 7, ASK_REMEMBER = 8 };
enum reply { TOLD_HANDLE = 0x101, TOLD_PIECES = 0x103, TOLD_BOOK = 0x107 };
enum refusal { NOT_FOUND = 1, DENIED = 2, QUOTA = 3, BUSY = 8, CHANGED = 9, FILE_SYSTEM = 10 };

struct piece {
    uint32_t flags, zero;
    uint64_t offset, length;
};

struct answer {
    uint32_t refusal, fresh;
    uint64_t offset, zero;
};

/* What a library would like: room for so many bytes, at such a multiple. */
struct room {
    uint64_t key, length, alignment;
};

/* What a library's relocated data are remembered by. */
struct name {
    uint64_t key, address, start, length;
};

/* One question with its answer. */
struct exchange {
    /* The question: its body, and descriptors to go with it. */
    const void *body;
    size_t length;
    const int *files;
    size_t file_count;
    /* The answer: room for its body, and the descriptors that came with it, which are the caller's. */
    void *told;
    size_t room;
    size_t told_length;
    int descriptors[MOST_PIECES];
    size_t descriptor_count;
};

/* Asks; whether there was an answer of the expected kind. Gives up where the store does not answer. */
int ask_store(struct exchange *exchange, enum request request, enum reply reply);
/* Whether the file shows so many bytes for good; its inode, if that is wanted. */
int is_sealed(int fd, uint64_t end, uint64_t *inode);
/* The same of a file that has a name. */
int is_immutable(const char *path, uint64_t end, uint64_t *inode);

/* ---- names.c: what is known without asking ---- */

#define KEY_WORDS 8
enum { KEY_FILE = 1, KEY_PLACE = 2, KEY_RELOCATED = 3, KEY_PREPARED = 4 };

#define LOADABLE 2u
#define UNPLACED 4u

/* Something that the store has written down: a slot of the index. */
struct entry {
    uint64_t state, key[KEY_WORDS], value[3];
    char name[160];
};

/* Looks something up; whether it is there. */
int find_entry(const uint64_t key[KEY_WORDS], struct entry *entry);
/* Looks a file up, as it is reached by this mount; whether there is an object that shows all of it before `end` and has these flags. */
int find_file(const struct stat *found, uint64_t mount, uint64_t end, uint64_t flags, struct entry *entry);
/* Opens the object of an entry; a descriptor, or -1 where it is gone or does not show `end` bytes for good. Tells its inode, if
   that is wanted. */
int open_object(const struct entry *entry, uint64_t end, uint64_t *inode);
/* Looks at the object of an entry without opening it; its inode, or 0 where it is gone or does not show `end` bytes for good. */
uint64_t find_object(const struct entry *entry, uint64_t end);
/* The path of the object that was opened or found last. */
const char *object_name(void);
/* Nothing more will be looked up for now. */
void finish_names(void);
/* From where to where libraries' places are; empty where that is not known. */
struct range span_of_places(void);
uint64_t mix(uint64_t hash, uint64_t word);

/* ---- libraries.c: libraries loaded from objects ---- */

/* The program has the loader open this path, which is its name: whether it is to be left alone, as it is small. */
int leave_small(const char *path);
/* The loader is about to open this file: what it is to open. */
const char *find_library(const char *name, int is_searched);
/* It has mapped what it opened; whether nothing is to be exchanged, as that was an object, or is left alone. */
int note_library(const struct link_map *map);
/* It will unmap it. */
void forget_library(const struct link_map *map);
/* It has opened all it wanted. */
void finish_libraries(void);

/* ---- origin.c: what the loader knows of a library's path ---- */

/* Finds out, by a library that was loaded under its own path, where the loader keeps the directory that it has a library from; whether
   that is known. */
int find_origin(const struct link_map *map);
/* Gets ready to have the loader open, in place of this absolute path, the file that is open there, of this inode; whether it can. */
int replace_path(const char *name, int fd, uint64_t inode);
/* What it is to open. */
const char *replacing_path(void);
/* The loader has mapped what it was given: it shall know it by the path that was asked for. */
void restore_path(const struct link_map *map);

/* ---- segments.c: what the kernel says of the program's memory ---- */

/* A mapping of a file. */
struct mapping {
    uintptr_t start, end;
    uint64_t offset, device, inode;
    int writable, executable, readable, shared;
};

/* A device's number as stat(2) has it. */
uint64_t device_of(uint64_t major, uint64_t minor);
/* Gets ready to be asked, if it is not yet; whether that is possible. `done_looking` ends it. */
int start_looking(void);
void done_looking(void);
/* The first mapping of a file that ends behind `address`; whether there is one. */
int find_mapping(uintptr_t address, struct mapping *found);
/* The pages of this range will be asked for: they are looked at together. */
void look_at(uintptr_t start, uintptr_t end);
/* The first run of pages from `start` on that are the program's own copies; empty where there is none before `end`. Pages
   of which nothing is known count. */
struct range own_pages(uintptr_t start, uintptr_t end);

/* ---- files.c: files' segments by shared objects ---- */

/* An object of the loader was mapped. */
void note_opened(const struct link_map *map);
/* It will be unmapped. */
void forget_opened(const struct link_map *map);
/* How many were noted. */
size_t opened_objects(void);
/* Shares the segments of all that was noted. */
void share_files(void);

/* ---- place.c: where libraries are loaded ---- */

/* A library that is where it always does. */
struct placed {
    struct name name;
    uintptr_t start;
    size_t length;
    /* Whether the loader found its data prepared. */
    int is_prepared;
};

/* Whether a file of so many bytes may have a place: others need not be opened. */
int may_have_place(uint64_t size);
/* The loader is about to map this file, of so many bytes: sees to it that it is mapped where the book says. */
void prepare_place(int fd, uint64_t size);
/* The loader has mapped what it wanted. */
void finish_places(void);
/* What is at this address will be unmapped. */
void note_closed(uintptr_t base);
/* Libraries whose relocated data are still their own: the number, and each. */
size_t placed_count(void);
struct placed *placed_at(size_t index);
void forget_placed(size_t index);

/* ---- prepared.c: relocated data that the store has made before ---- */

/* A library was mapped from this object, and is not relocated yet: puts the data that were prepared for its place over those of the
   object, if it has them, and has the loader leave out what is done by that. */
void use_prepared(const struct link_map *map, const struct entry *object);
/* What was prepared for a library's place; a descriptor, and how many bytes it has, or -1. `tag` is that of the library's
   object, or 0 for any. */
int open_prepared(const struct placed *place, uint64_t tag, struct entry *entry);

/* ---- static_tls.c: programs that cannot start under an auditor ---- */

/* The loader has mapped a library of a program that has not started: executes the program without the auditor if it could not be
   started with it. */
void note_static_tls(const struct link_map *map);

/* ---- relocated.c: relocated data by shared objects ---- */

/* Shares what the loader has relocated and made read-only. */
void share_relocated(void);

#endif
