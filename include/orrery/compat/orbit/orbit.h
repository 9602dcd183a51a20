/*
 * Orrery's orbits under the names of the orbit authors' user library.
 *
 * A program that was ported to that library (OrderLab's, for their patched kernel) compiles against this header unchanged
 * and runs on a stock kernel. Compile with -I PREFIX/include/orrery/compat, so that #include <orbit/orbit.h> finds it, or with
 * -I PREFIX/include/orrery/compat/orbit for #include "orbit.h"; link with -lorrery. New programs use <orrery/orbit.h>, which
 * follows the paper and can do more; both may be included in one source file.
 *
 * Types have the fields of all published variants of the library, so a source for any of them compiles: pools with `used`
 * and pools with `data_start` and `data_length`, linear allocators and those with a table of functions.
 *
 * What differs from the patched kernel:
 *
 *   - Memory that a task is to look at is in pools made here. A call that names other memory fails with EINVAL.
 *   - A pool's allocator with use_meta is a general one: orbit_free gives memory back for use by the next orbit_alloc.
 *     Without use_meta it gives out one part after the other from `used` on. A program may empty either kind by setting
 *     `used` to 0. All memory comes zeroed, and aligned to 16 bytes.
 *   - An orbit has all pools as of its creation, until a call names them; of pools at addresses that the program chose, the
 *     first 120.
 *   - At most 1,024 calls to one orbit are under way at a time. One more waits until there is room, for ten seconds,
 *     then fails with EAGAIN.
 *   - A scratch that arrives is checked as a whole first: one whose records do not add up is refused (EBADMSG). An update
 *     aimed at memory that is not there and an operation that is no code are not applied: the record stays the current
 *     one and ORBIT_UNKNOWN is returned, or by orbit_skip passed over.
 *   - A received scratch appears at the address from which it was sent where that is in a pool of main's or is free in
 *     main; otherwise elsewhere.
 *   - Of orbits that have died, and that were not destroyed, the last 16 of which everything was received are kept. What was
 *     received of an older one must not be looked at any more, and orbit_destroy fails with ESRCH for it.
 *   - orbit_commit fails with ENOSYS, as with the authors' own last kernel, which has the system call behind it compiled
 *     out. In earlier ones it put whole pages that the task had changed over main's while main ran, unasked and with all
 *     that lay beside them. One mode of one of their old programs asks for it. Send updates.
 *
 * Errors set errno: EINVAL for a dead orbit, for 1,024 bytes of arguments or more, for bad pools and for tasks that are
 * not there; ESRCH where the orbit died during the call; ECANCELED for a cancelled call; EPERM inside an orbit, and where
 * the orbit belongs to another process; EAGAIN, ENOMEM.
 */
#ifndef ORRERY_AUTHORS_ORBIT_H
#define ORRERY_AUTHORS_ORBIT_H

#ifdef ORRERY_COMPAT_ORBIT_H
#error "<orrery/compat/orbit.h> and the orbit authors' orbit.h do not mix in one source file"
#endif

#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <sys/types.h>

#ifdef __cplusplus
#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
extern "C" {
#else
#include <stdbool.h>
#endif

/* The library has these under names that do not collide with those of <orrery/orbit.h>. */
#define ORRERY_AUTHORS_(name) __asm__("orrery_authors_" #name)

/* Flags of asynchronous calls. A call is either skipped itself or cancels earlier ones. */
#define ORBIT_NORETVAL (1 << 1)        /* nobody will receive anything of it */
#define ORBIT_CANCELLABLE (1 << 2)     /* later calls may cancel it while it waits */
#define ORBIT_SKIP_SAME_ARG (1 << 3)   /* not made if one with equal arguments waits */
#define ORBIT_SKIP_ANY (1 << 4)        /* not made if any waits */
#define ORBIT_CANCEL_SAME_ARG (1 << 5) /* cancels waiting ones with equal arguments */
#define ORBIT_CANCEL_ANY (1 << 6)      /* cancels all waiting ones */

/* Room for the data of an update that orbit_recv gives. */
#define ORBIT_BUFFER_MAX 1024

#define ORBIT_NAME_LEN 16

typedef int obid_t;

/* What an orbit runs: its store (what its init function returned) and its own copy of the call's arguments. */
typedef unsigned long (*orbit_entry)(void *store, void *argbuf);

/* An orbit, as orbit_create gives it. The caller frees it with free(3), when the orbit is gone. */
struct orbit_module {
    pid_t mpid;   /* the process that made it */
    obid_t lobid; /* its number among that process' orbits: 1, 2, ... */
    pid_t gobid;  /* its process id: a child of main's like others */
    orbit_entry entry_func;
    char name[ORBIT_NAME_LEN];
};

/* Kept for sources that name them: Orrery chooses by what it measures. */
enum orbit_pool_mode { ORBIT_COW, ORBIT_MOVE, ORBIT_COPY };

/*
 * Memory that orbits see. They see what is in use: the first `used` bytes, or as far as `data_start` and `data_length` or
 * the pool's allocator reach, whichever is more. A pool that is used without an allocator has `used` set by the program.
 */
struct orbit_pool {
    void *rawptr;
    size_t length;
    size_t used;
    void *data_start;
    size_t data_length;
    enum orbit_pool_mode mode;
    void *orrery_area; /* the library's own */
};

/* Names an asynchronous call. */
struct orbit_task {
    struct orbit_module *orbit;
    unsigned long taskid;
};

/* Bytes for a place in main. */
struct orbit_update {
    void *ptr;
    size_t length;
    char data[];
};

typedef unsigned long (*orbit_operation_func)(size_t argc, unsigned long argv[]);

/* A call to make in main. */
struct orbit_operation {
    orbit_operation_func func;
    size_t argc;
    unsigned long argv[];
};

/* Bytes to look at. */
struct orbit_any {
    unsigned long length;
    char data[];
};

enum orbit_type { ORBIT_END, ORBIT_UNKNOWN, ORBIT_ANY, ORBIT_UPDATE, ORBIT_OPERATION };

/* A record of a scratch. */
struct orbit_repr {
    enum orbit_type type;
    union {
        struct orbit_update update;
        struct orbit_operation operation;
        struct orbit_any any;
    };
};

/*
 * Makes an orbit: a process that inherits everything as it is now, runs init_func, keeps what that returned as the store,
 * and waits for calls. Returns NULL on failure.
 */
struct orbit_module *orbit_create(const char *module_name, orbit_entry entry_func, void *(*init_func)(void))
    ORRERY_AUTHORS_(create);

/* Whether this process is an orbit. */
bool is_orbit_context(void) ORRERY_AUTHORS_(is_orbit_context);

/*
 * Snapshots the pools, runs func (or, if that is NULL, the orbit's entry function) on a copy of the argument, and returns
 * what it returned; -1 and errno on failure.
 */
long orbit_call(struct orbit_module *module, size_t npool, struct orbit_pool **pools, orbit_entry func,
                void *arg, size_t argsize) ORRERY_AUTHORS_(call);

/*
 * The same without waiting for the task. The pools may be changed at once. Returns 0, and names the call in *task unless
 * task is NULL. A skipped call returns 0 and has the task id 0. On failure, which other values mean, the task id is 0 too.
 */
int orbit_call_async(struct orbit_module *module, unsigned long flags, size_t npool,
                     struct orbit_pool **pools, orbit_entry func, void *arg, size_t argsize,
                     struct orbit_task *task) ORRERY_AUTHORS_(call_async);

/* Cancel waiting calls: one, or those with these arguments. 0 if there were any; -1 and ENOENT if not. */
int orbit_cancel_by_task(struct orbit_task *task) ORRERY_AUTHORS_(cancel_by_task);
int orbit_cancel_by_arg(struct orbit_module *module, void *arg, size_t argsize)
    ORRERY_AUTHORS_(cancel_by_arg);

/* From a task: sends an update. 0, or (unsigned long)-1 and errno. */
unsigned long orbit_send(const struct orbit_update *update) ORRERY_AUTHORS_(send);

/*
 * Waits for the next update of a call. Returns 0 and fills *update, which needs room for the data: ORBIT_BUFFER_MAX bytes
 * are copied at most. (unsigned long)-1 means that there is none: ENODATA after the task returned, ESRCH after it died.
 */
unsigned long orbit_recv(struct orbit_task *task, struct orbit_update *update) ORRERY_AUTHORS_(recv);

/* Always fails with ENOSYS: see above. */
unsigned long orbit_commit(void) ORRERY_AUTHORS_(commit);

/* Make a pool, of whole pages, for whatever orbit (ob may be NULL), anywhere or at an address. NULL on failure. */
struct orbit_pool *orbit_pool_create(struct orbit_module *ob, size_t init_pool_size)
    ORRERY_AUTHORS_(pool_create);
struct orbit_pool *orbit_pool_create_at(struct orbit_module *ob, size_t init_pool_size, void *addr)
    ORRERY_AUTHORS_(pool_create_at);

/* ---- allocators ---- */

struct orbit_allocator;

struct orbit_allocator_vtable {
    void *(*alloc)(struct orbit_allocator *alloc, size_t size);
    void (*free)(struct orbit_allocator *alloc, void *ptr);
    void *(*realloc)(struct orbit_allocator *alloc, void *oldptr, size_t newsize);
    void (*destroy)(struct orbit_allocator *alloc);
};

/* Gives out parts of a pool, or of any memory. *allocated says how far from the start the memory is in use. */
struct orbit_allocator {
    void *start;
    size_t length;
    size_t *allocated;
    pthread_spinlock_t lock;
    bool use_meta;
    struct orbit_allocator_vtable *vtable;
    struct orbit_pool *orrery_pool; /* the library's own */
};

/*
 * Makes an allocator that gives out one part of `length` bytes after the other. With use_meta it notes the size of each,
 * so that orbit_realloc can copy it; orbit_free of the last part makes its room free again.
 */
struct orbit_allocator *orbit_allocator_create(void *start, size_t length, size_t *allocated, bool use_meta)
    ORRERY_AUTHORS_(allocator_create);
void orbit_allocator_destroy(struct orbit_allocator *alloc) ORRERY_AUTHORS_(allocator_destroy);

/* Makes the allocator of a pool. */
struct orbit_allocator *orbit_allocator_from_pool(struct orbit_pool *pool, bool use_meta)
    ORRERY_AUTHORS_(allocator_from_pool);

/* A part of `size` bytes. Where there is no room, that is reported on standard error and the program aborts. */
void *__orbit_alloc(struct orbit_allocator *alloc, size_t size, const char *file, int line)
    ORRERY_AUTHORS_(alloc);
void orbit_free(struct orbit_allocator *alloc, void *ptr) ORRERY_AUTHORS_(free);
void *orbit_realloc(struct orbit_allocator *alloc, void *oldptr, size_t newsize) ORRERY_AUTHORS_(realloc);

static inline void *__orbit_calloc(struct orbit_allocator *alloc, size_t size, const char *file, int line) {
    return memset(__orbit_alloc(alloc, size, file, line), 0, size);
}

#define orbit_alloc(alloc, size) __orbit_alloc(alloc, size, __FILE__, __LINE__)
#define orbit_calloc(alloc, size) __orbit_calloc(alloc, size, __FILE__, __LINE__)
#define orbit_allocated_by(ptr, alloc)                                                                       \
    ((alloc) != NULL && (const char *)(ptr) >= (const char *)(alloc)->start &&                               \
     (const char *)(ptr) < (const char *)(alloc)->start + (alloc)->length)

/* ---- scratches: several records in one message ---- */

struct orbit_scratch {
    void *ptr;
    size_t cursor;
    size_t size_limit;
    size_t count;
    struct orbit_allocator *any_alloc;
};

union orbit_result {
    unsigned long retval;
    struct orbit_scratch scratch;
};

/* Says in which pool scratches are made. 0, or -1 for none. */
int orbit_scratch_set_pool(struct orbit_pool *pool) ORRERY_AUTHORS_(scratch_set_pool);

/* Starts a scratch. 0, or -1 where there is no pool. What was sent does not take room in the pool for ever. */
int orbit_scratch_create(struct orbit_scratch *s) ORRERY_AUTHORS_(scratch_create);

/* Add a record. They return how many there are, and -1 where there is no room. */
int orbit_scratch_push_operation(struct orbit_scratch *s, orbit_operation_func func, size_t argc,
                                 unsigned long argv[]) ORRERY_AUTHORS_(scratch_push_operation);
int orbit_scratch_push_update(struct orbit_scratch *s, void *ptr, size_t length)
    ORRERY_AUTHORS_(scratch_push_update);

/* Adds bytes from ptr, or, where that is NULL, room for as many. Returns their place in the scratch, or NULL. */
void *orbit_scratch_push_any(struct orbit_scratch *s, void *ptr, size_t length)
    ORRERY_AUTHORS_(scratch_push_any);

/* Starts a record of bytes with an allocator inside; the next use of the scratch ends it, or orbit_scratch_close_any. */
struct orbit_allocator *orbit_scratch_open_any(struct orbit_scratch *s, bool use_meta)
    ORRERY_AUTHORS_(scratch_open_any);
int orbit_scratch_close_any(struct orbit_scratch *s) ORRERY_AUTHORS_(scratch_close_any);

/* From a task: sends a scratch. 0, or -1 and errno. */
int orbit_sendv(struct orbit_scratch *s) ORRERY_AUTHORS_(sendv);

/*
 * Waits for the next message of a call. 1: result->scratch has it. 0: the call is over, result->retval has what the task
 * returned. -1: errno says why; ESRCH where the task died.
 */
int orbit_recvv(union orbit_result *result, struct orbit_task *task) ORRERY_AUTHORS_(recvv);

/*
 * Apply the records that are left (or one of them), or pass them over. With `yield`, bytes to look at stop them and stay
 * the current record. They return the type at which they stopped, or that of the one record; ORBIT_END at the end.
 */
enum orbit_type orbit_apply(struct orbit_scratch *s, bool yield) ORRERY_AUTHORS_(apply);
enum orbit_type orbit_apply_one(struct orbit_scratch *s, bool yield) ORRERY_AUTHORS_(apply_one);
enum orbit_type orbit_skip(struct orbit_scratch *s, bool yield) ORRERY_AUTHORS_(skip);
enum orbit_type orbit_skip_one(struct orbit_scratch *s, bool yield) ORRERY_AUTHORS_(skip_one);

/* The current record, and the one behind it, which becomes the current one; NULL at the end. */
struct orbit_repr *orbit_scratch_first(struct orbit_scratch *s) ORRERY_AUTHORS_(scratch_first);
struct orbit_repr *orbit_scratch_next(struct orbit_scratch *s) ORRERY_AUTHORS_(scratch_next);

static inline bool orbit_scratch_empty(struct orbit_scratch *s) { return s->count == 0; }

/* End an orbit, or all of this process. 0, or -1 and errno. */
int orbit_destroy(obid_t gobid) ORRERY_AUTHORS_(destroy);
int orbit_destroy_all(void) ORRERY_AUTHORS_(destroy_all);

/* Whether it lives, and whether it does not. */
bool orbit_exists(struct orbit_module *ob) ORRERY_AUTHORS_(exists);
bool orbit_gone(struct orbit_module *ob) ORRERY_AUTHORS_(gone);

#ifdef __cplusplus
}

#if __cplusplus >= 201103L
#define ORRERY_AUTHORS_NOEXCEPT noexcept
#else
#define ORRERY_AUTHORS_NOEXCEPT throw()
#endif

#if __cplusplus >= 201103L
/* Add an operation that runs `body` in main, with the named values as they are now. */
#define orbit_scratch_run1(s, arg1t, arg1n, body)                                                            \
    do {                                                                                                     \
        unsigned long orrery_argv[] = {(unsigned long)(arg1n)};                                              \
        orbit_scratch_push_operation(                                                                        \
            s,                                                                                               \
            [](size_t, unsigned long argv[]) -> unsigned long {                                              \
                arg1t arg1n = (arg1t)argv[0];                                                                \
                body;                                                                                        \
                return 0;                                                                                    \
            },                                                                                               \
            1, orrery_argv);                                                                                 \
    } while (0)
#define orbit_scratch_run2(s, arg1t, arg1n, arg2t, arg2n, body)                                              \
    do {                                                                                                     \
        unsigned long orrery_argv[] = {(unsigned long)(arg1n), (unsigned long)(arg2n)};                      \
        orbit_scratch_push_operation(                                                                        \
            s,                                                                                               \
            [](size_t, unsigned long argv[]) -> unsigned long {                                              \
                arg1t arg1n = (arg1t)argv[0];                                                                \
                arg2t arg2n = (arg2t)argv[1];                                                                \
                body;                                                                                        \
                return 0;                                                                                    \
            },                                                                                               \
            2, orrery_argv);                                                                                 \
    } while (0)
#define orbit_scratch_run3(s, arg1t, arg1n, arg2t, arg2n, arg3t, arg3n, body)                                \
    do {                                                                                                     \
        unsigned long orrery_argv[] = {(unsigned long)(arg1n), (unsigned long)(arg2n),                       \
                                       (unsigned long)(arg3n)};                                              \
        orbit_scratch_push_operation(                                                                        \
            s,                                                                                               \
            [](size_t, unsigned long argv[]) -> unsigned long {                                              \
                arg1t arg1n = (arg1t)argv[0];                                                                \
                arg2t arg2n = (arg2t)argv[1];                                                                \
                arg3t arg3n = (arg3t)argv[2];                                                                \
                body;                                                                                        \
                return 0;                                                                                    \
            },                                                                                               \
            3, orrery_argv);                                                                                 \
    } while (0)
#endif

/* Programs that are built without exceptions end where others throw. */
#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define ORRERY_AUTHORS_BAD_ALLOC() throw std::bad_alloc()
#else
#define ORRERY_AUTHORS_BAD_ALLOC() std::abort()
#endif

namespace orbit {

/* Where the templates and the operators below allocate; std::allocator where it is NULL. */
__attribute__((weak)) orbit_allocator *__global_allocator = NULL;

inline void set_global_allocator(orbit_allocator *alloc) { __global_allocator = alloc; }

inline void *__orbit_allocate_wrapper(orbit_allocator *alloc, std::size_t n, std::size_t type_size) {
    if (type_size != 0 && n > (std::size_t)-1 / type_size)
        ORRERY_AUTHORS_BAD_ALLOC();
    return __orbit_alloc(alloc, n * type_size, __FILE__, __LINE__);
}

inline void __orbit_deallocate_wrapper(orbit_allocator *alloc, void *ptr,
                                       std::size_t) ORRERY_AUTHORS_NOEXCEPT {
    orbit_free(alloc, ptr);
}

/* For containers whose elements are where __global_allocator says. */
template <class T> struct global_allocator {
    typedef T value_type;

    global_allocator() {}
    template <class U> global_allocator(const global_allocator<U> &) {}

    T *allocate(std::size_t n) {
        if (__global_allocator)
            return static_cast<T *>(__orbit_allocate_wrapper(__global_allocator, n, sizeof(T)));
        return std::allocator<T>().allocate(n);
    }
    void deallocate(T *p, std::size_t n) ORRERY_AUTHORS_NOEXCEPT {
        if (__global_allocator)
            __orbit_deallocate_wrapper(__global_allocator, p, n);
        else
            std::allocator<T>().deallocate(p, n);
    }
    bool operator==(const global_allocator &) const { return true; }
    bool operator!=(const global_allocator &) const { return false; }
};

/* A base for classes whose objects `new` puts where __global_allocator says. */
struct global_new_operator {
    static void *operator new(std::size_t size) {
        if (__global_allocator)
            return __orbit_allocate_wrapper(__global_allocator, 1, size);
        return ::operator new(size);
    }
    static void operator delete(void *ptr) ORRERY_AUTHORS_NOEXCEPT {
        if (__global_allocator && orbit_allocated_by(ptr, __global_allocator))
            __orbit_deallocate_wrapper(__global_allocator, ptr, 1);
        else
            ::operator delete(ptr);
    }
};

/* For containers whose elements are in a given allocator's memory. It is not destroyed with the container. */
template <class T> struct allocator {
    typedef T value_type;

    allocator(orbit_allocator *alloc) : alloc(alloc) {}
    template <class U> allocator(const allocator<U> &other) : alloc(other.alloc) {}

    T *allocate(std::size_t n) {
        if (alloc)
            return static_cast<T *>(__orbit_allocate_wrapper(alloc, n, sizeof(T)));
        return std::allocator<T>().allocate(n);
    }
    void deallocate(T *p, std::size_t n) ORRERY_AUTHORS_NOEXCEPT {
        if (alloc)
            __orbit_deallocate_wrapper(alloc, p, n);
        else
            std::allocator<T>().deallocate(p, n);
    }
    bool operator==(const allocator &other) const { return alloc == other.alloc; }
    bool operator!=(const allocator &other) const { return alloc != other.alloc; }

    orbit_allocator *alloc;
};

#undef ORRERY_AUTHORS_NOEXCEPT

} /* namespace orbit */

#endif

#endif
