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
 * Link with -lorrery. The library is built by orrery-cc or orrery-c++, which are clang with a pass that moves writable
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
 *   EBUSY     a thread is in the instance: it was not left, perhaps by longjmp(3), or runs in it
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

#ifdef __cplusplus
}
#endif

#endif
