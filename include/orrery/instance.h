/*
 * Orrery: many instances of one library in a process. Code and constants exist once, state is apart.
 *
 *     struct orrery_instance_library *library = orrery_instance_load("./libcounter.so", NULL);
 *     if (!library)
 *         err(1, "%s", orrery_last_error());
 *     int (*next)(void) = (int (*)(void))orrery_instance_symbol(library, "next");
 *     struct orrery_instance *one = orrery_instance_create(library), *two = orrery_instance_create(library);
 *
 *     orrery_instance_enter(one);
 *     next();                                                // counts in `one`
 *     orrery_instance_leave(one);
 *
 * Link with -lorrery. A library that was not built in any particular way is mapped once for each instance: see MAPPED LIBRARIES
 * below. Else the library is built by orrery-cc or orrery-c++, which are clang with a pass that moves writable
 * variables to compartment-local storage: `CC=orrery-cc ./configure && make`. After "ORC: Increasing Cloud Memory Density
 * via Object Reuse with Capabilities" (Sartakov et al., OSDI 2023).
 *
 * WHAT AN INSTANCE HAS
 *
 * Its own copy of all writable variables, static ones included, as they were when the library was loaded; its own
 * thread-local variables in each thread; its own heap, from which malloc(3) and its relatives allocate when the library
 * calls them. Variables with __attribute__((annotate("cls_shared"))), under orrery-cc also
 * __attribute__((cls_shared)), belong to all instances. Constructors and destructors run in each instance.
 *
 * Who calls the library outside of all instances uses its own state, as that of any library.
 *
 * Memory that the library allocated with malloc(3) in an instance is released by the library, or with the instance. The
 * program must not pass it to free(3), nor the library to another instance.
 *
 * Instances are no protection: a stray pointer of one reaches all.
 *
 * THREADS, FORKS
 *
 * One thread is in an instance at a time, unless it was attached. Threads that the library makes with
 * pthread_create(3) are in the instance that made them. A forked child has copies of all instances.
 *
 * ERRORS
 *
 * Functions that fail return -1 or NULL, set errno, and have changed nothing; orrery_last_error returns a text.
 *
 *   ENOEXEC   the file is no library that was built with the pass, wholly and position-independently
 *   EALREADY  the process has the library already, so its state may not be the first one
 *   ENOENT    there is no such file, or no such symbol
 *   EBUSY     a thread is in the instance: it was not left, perhaps by longjmp(3), or runs in it; or the library was built with
 *             ORRERY_CLS_BASE=gs, and another one of the process, or another part of the program, uses the base of GS
 *   EPERM     the calling thread is not in the instance, or entered another one since
 *   EINVAL    a null pointer where none may be; a snapshot of another instance
 *   ENOMEM    no memory, or no address space
 *   others    what a system call returned
 */
#ifndef ORRERY_INSTANCE_H
#define ORRERY_INSTANCE_H

#include <orrery/error.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct orrery_instance_library;
struct orrery_instance;
struct orrery_instance_snapshot;

enum orrery_instance_state {
    ORRERY_INSTANCE_STATE_DEFAULT = 0, /* copied, if it is at most 256 KiB, else mapped */
    ORRERY_INSTANCE_STATE_COPIED = 1,  /* states lie side by side: the least memory, and no mappings */
    ORRERY_INSTANCE_STATE_MAPPED = 2   /* pages that an instance does not write are shared with all others */
};

struct orrery_instance_options {
    size_t size;
    uint64_t heap_limit; /* bytes that the heap of an instance may have; 0: no limit */
    int state;           /* enum orrery_instance_state */
    int reserved;        /* 0 */
};

#define ORRERY_INSTANCE_OPTIONS_INIT                                                                         \
    { sizeof(struct orrery_instance_options), 0, 0, 0 }

/* Loads a library from a file; NULL for the options stands for the defaults. Loading it again gives another handle of the
 * same library, whose options stay. */
struct orrery_instance_library *orrery_instance_load(const char *path,
                                                     const struct orrery_instance_options *options);

/* Closes the handle. The library stays loaded while it has instances or snapshots. */
void orrery_instance_close(struct orrery_instance_library *library);

/* Returns the address of a function. Called in an instance, it uses the state of that. */
void *orrery_instance_symbol(const struct orrery_instance_library *library, const char *name);

/* Returns how many bytes of state an instance has, and 0 for NULL. */
size_t orrery_instance_state_size(const struct orrery_instance_library *library);

/* Makes an instance. */
struct orrery_instance *orrery_instance_create(const struct orrery_instance_library *library);

/* Has the calling thread use the instance, until it leaves. In a callback of one instance, others can be entered. */
int orrery_instance_enter(struct orrery_instance *instance);

/* Returns to what was before orrery_instance_enter. */
int orrery_instance_leave(struct orrery_instance *instance);

/* Binds the calling thread to the instance, beside other threads: for libraries that several threads may use. */
int orrery_instance_attach(struct orrery_instance *instance);

/* Ends what orrery_instance_attach began. */
int orrery_instance_detach(struct orrery_instance *instance);

/* Returns the address of a variable of the library in this instance. */
void *orrery_instance_variable(const struct orrery_instance *instance, const char *name);

/* Makes the instance as it was when it was created. Destructors do not run, constructors do. */
int orrery_instance_reset(struct orrery_instance *instance);

/* Takes a snapshot of state and heap. Thread-local variables are not in it: after a restore they begin afresh. */
struct orrery_instance_snapshot *orrery_instance_snapshot_take(struct orrery_instance *instance);

/* Makes the instance as the snapshot of it has it. */
int orrery_instance_restore(struct orrery_instance *instance,
                            const struct orrery_instance_snapshot *snapshot);

/*
 * Makes another instance of a snapshot, at other addresses: each aligned word that holds an address in the memory of the
 * first one is taken for a pointer, and adjusted.
 */
struct orrery_instance *orrery_instance_create_from(const struct orrery_instance_snapshot *snapshot);

/* Returns where in a copy, made by orrery_instance_create_from, that is which is at the address in the first instance: for a
 * handle that the library returned there, the one that is valid in the copy. ENOENT: the snapshot has no such memory. */
void *orrery_instance_copy_of(const struct orrery_instance *copy, const void *address);

/* Releases the snapshot. */
void orrery_instance_snapshot_destroy(struct orrery_instance_snapshot *snapshot);

/* Runs the library's destructors in the instance, and releases its state and everything that it allocated.
 * orrery_instance_destroy(NULL) is a no-op. */
int orrery_instance_destroy(struct orrery_instance *instance);

/*
 * MAPPED LIBRARIES
 *
 * Of a library as a distribution has it, without its source, each instance is a mapping of its file: pages that are not written
 * are the page cache's in all of them, the others an instance's own. There is nothing to enter: an instance has functions of its
 * own, at other addresses than those of the next one.
 *
 *     struct orrery_instance_mapped_library *library = orrery_instance_mapped_load("/usr/lib/x86_64-linux-gnu/libsqlite3.so.0", NULL);
 *     struct orrery_instance_mapped *one = orrery_instance_mapped_create(library);
 *     int (*open)(const char *, sqlite3 **) =
 *         (int (*)(const char *, sqlite3 **))orrery_instance_mapped_symbol(one, "sqlite3_open");
 *
 * The libraries that it needs, the C library among them, are the process's, and so are their state and the heap. Constructors
 * and destructors run in each instance; thread-local variables are one for each thread and instance. dladdr(3) does not find the
 * functions, and debuggers only if they are given the base.
 *
 * Errors are those above, and:
 *
 *   ENOEXEC   the file is malformed, for another machine, wants an executable stack or text relocations, or has thread-local
 *             variables of the initial-exec model; a library or a symbol that it needs is not there
 *   EBUSY     threads run that the instance made, or have thread-local objects of it
 */
struct orrery_instance_mapped_library;
struct orrery_instance_mapped;

enum orrery_instance_unwind {
    ORRERY_INSTANCE_UNWIND_DEFAULT = 0, /* if functions of the library handle exceptions */
    ORRERY_INSTANCE_UNWIND_ALWAYS = 1,
    ORRERY_INSTANCE_UNWIND_NEVER = 2
};

struct orrery_instance_mapped_options {
    size_t size;
    int unwind;   /* enum orrery_instance_unwind: whether exceptions pass through functions of the library */
    int reserved; /* 0 */
};

#define ORRERY_INSTANCE_MAPPED_OPTIONS_INIT                                                                  \
    { sizeof(struct orrery_instance_mapped_options), 0, 0 }

/* Reads a library, and loads the libraries that it needs; NULL for the options stands for the defaults. */
struct orrery_instance_mapped_library *
orrery_instance_mapped_load(const char *path, const struct orrery_instance_mapped_options *options);

/* Closes the handle. What its instances need stays. */
void orrery_instance_mapped_close(struct orrery_instance_mapped_library *library);

/* Maps the library once more, and runs its constructors. */
struct orrery_instance_mapped *
orrery_instance_mapped_create(const struct orrery_instance_mapped_library *library);

/* Returns the address of a function or variable in this instance, which is valid until that is destroyed; of a thread-local
 * variable, that of the calling thread. */
void *orrery_instance_mapped_symbol(const struct orrery_instance_mapped *instance, const char *name);

/* Returns where the instance is mapped, and NULL for NULL. gdb: add-symbol-file PATH -o BASE */
void *orrery_instance_mapped_base(const struct orrery_instance_mapped *instance);

/* Runs the library's destructors, and unmaps the instance. As after dlclose(3), nothing may use its functions and variables any
 * more, in no thread and no callback. orrery_instance_mapped_destroy(NULL) is a no-op. */
int orrery_instance_mapped_destroy(struct orrery_instance_mapped *instance);

#ifdef __cplusplus
}
#endif

#endif
