/*
 * Orrery: orbits, auxiliary tasks in an address space of their own.
 *
 *     struct orrery_area *area = orrery_area_create(4096);
 *     struct orrery_orbit *checker = orrery_orbit_create("checker", check, NULL);
 *     struct table *table = orrery_area_alloc(area, sizeof(*table));
 *     ...
 *     struct check_args args = {table};
 *     long broken = orrery_orbit_call(checker, 1, &area, &args, sizeof(args));
 *     if (broken < 0)
 *         warnx("no check this time: %s", orrery_last_error()); // crashed, hung, killed: the program goes on
 *
 *     long check(void *argbuf, void *store)   // runs in the orbit, and sees *table as it was at the call
 *     {
 *         struct table *table = ((struct check_args *)argbuf)->table;
 *         ...
 *     }
 *
 * Link with -lorrery. From "Operating System Support for Safe and Efficient Auxiliary Execution" (Jing and Huang,
 * OSDI 2022), Table 1 and Figures 4, 7, 11, on a stock Linux kernel. Programs ported to the authors' library take
 * orrery/compat/orbit/orbit.h.
 *
 * WHAT A TASK SEES
 *
 * The areas that the call names, at the same addresses, as they were when the call was made: all changes since the
 * last call are copied page by page while orrery_orbit_call or orrery_orbit_call_async runs, and main may change
 * everything as soon as that returns. Threads of main that write meanwhile have to be kept out by the lock that
 * protects the data anyway. Everything else (globals, the heap, files) a task has as it was when the orbit was
 * created. What a task writes to an area is its own copy, and gone with the next task. What it keeps elsewhere stays
 * until the orbit ends: the store that the init function returned is for that.
 *
 * COSTS
 *
 * A synchronous call takes some 10 us. A call pays 0.2 us for each MiB in use of the areas that it names and 0.4 us
 * for each page that was written since the last call; main pays 0.6 us for the first write to a page after a call.
 *
 * FAULTS
 *
 * A task that crashes, exits, runs too long or takes too much memory ends its orbit. The call fails with ESRCH,
 * orrery_last_error returns what happened, and what the task had pushed before still arrives. By the restart policy
 * the orbit comes back and runs its init function again; with no policy every later call fails with EINVAL.
 *
 * PROCESSES
 *
 * An orbit is a child process. Unless `reaper` is ORRERY_ORBIT_REAP_PROGRAM it sends no SIGCHLD that matters: the
 * library takes its status. Orbits belong to the process that made them; in a forked child they fail with ECHILD.
 * Areas may be used there, and by orbits that the child makes.
 *
 * ERRORS
 *
 * Calls that fail return -1 or NULL, set errno, and have changed nothing; orrery_last_error returns a text.
 *
 *   E2BIG      options with members that this version of the library does not know
 *   EINVAL     a handle that is none (any more), a pointer outside of the area, a function that is none, 1,024 bytes
 *              of arguments or more, an orbit that is dead for good
 *   ESRCH      the task failed, or the orbit ended before it came to the call, or was destroyed
 *   EAGAIN     the queue is full, or no process is to be had
 *   ECANCELED  the call was cancelled
 *   EALREADY   the call was skipped, because one like it waits
 *   ETIMEDOUT  the wait took too long; the call is still under way
 *   EPERM      not from inside an orbit, or only from there
 *   ECHILD     the orbit belongs to another process
 *   EBADMSG    an update made no sense and was refused
 *   ENOMEM     no memory, no room in the area, or no address space
 */
#ifndef ORRERY_ORBIT_H
#define ORRERY_ORBIT_H

#include <orrery/error.h>

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct orrery_orbit;
struct orrery_area;
struct orrery_orbit_future;

/* What an orbit runs: its own copy of the arguments (aligned to 64 bytes), and its store. */
typedef long (*orrery_orbit_entry)(void *argbuf, void *store);

/* ---- orbits ---- */

enum orrery_orbit_restart {
    ORRERY_ORBIT_RESTART_NEVER,
    ORRERY_ORBIT_RESTART_ON_CRASH, /* with growing pauses, and not for ever if it fails again and again: see below */
    ORRERY_ORBIT_RESTART_ALWAYS /* after an orderly exit, too */
};

enum orrery_orbit_when_full {
    ORRERY_ORBIT_FULL_WAIT_A_SECOND, /* then fail; less with ORRERY_ORBIT_NO_RETURN_VALUE, and not at all if it hangs */
    ORRERY_ORBIT_FULL_WAIT,
    ORRERY_ORBIT_FULL_FAIL,
    ORRERY_ORBIT_FULL_CANCEL_OLDEST /* cancellable call */
};

enum orrery_orbit_reaper { ORRERY_ORBIT_REAP_LIBRARY, ORRERY_ORBIT_REAP_PROGRAM };

/* What an orbit should be like. Zero means "as usual" everywhere; begin with ORRERY_ORBIT_OPTIONS_INIT. */
struct orrery_orbit_options {
    size_t size;   /* of this structure, set by ORRERY_ORBIT_OPTIONS_INIT */
    int restart;   /* enum orrery_orbit_restart */
    int when_full; /* enum orrery_orbit_when_full */
    int reaper; /* enum orrery_orbit_reaper; ORRERY_ORBIT_REAP_PROGRAM only goes with ORRERY_ORBIT_RESTART_NEVER */
    unsigned queue;         /* how many calls may be under way; 64 */
    unsigned time_limit_ms; /* how long a task may run; for ever */
    unsigned cpu_percent;   /* of one CPU; unlimited */
    unsigned processes;     /* how many processes and threads it may have; unlimited */
    size_t memory;          /* how much it may have; unlimited */
    int nice;               /* how much nicer than main it is; 0 */

    /*
     * How restarts follow one another. The first comes at once; before the second there is a wait, which doubles with each
     * further one. After too many in a row the orbit stays dead. One that lived long enough begins a new row.
     */
    unsigned restart_limit;      /* in a row; 10, or ORRERY_ORBIT_RESTART_WITHOUT_LIMIT */
    unsigned backoff_first_ms;   /* the wait before the second restart; 10 */
    unsigned backoff_longest_ms; /* the longest wait; 5,000 */
    unsigned healthy_after_ms;   /* how long it has to live for a new row; 10,000 */

    /*
     * Whether the orbit has all areas as of its creation, until calls name them. Otherwise areas that no call has named are
     * empty in the orbit, or not there.
     */
    int existing_areas;

    /*
     * Whether tasks run in the checking mode: what they touch and were not passed is written to standard error. The
     * environment variable ORRERY_ORBIT_CHECK=1 turns it on for all orbits.
     */
    int check;
};
#define ORRERY_ORBIT_RESTART_WITHOUT_LIMIT (~0u)
#define ORRERY_ORBIT_OPTIONS_INIT                                                                            \
    { sizeof(struct orrery_orbit_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/*
 * Makes an orbit with a name (1 to 50 characters) that runs `entry` for each call. `init`, if there is one, runs in
 * the orbit first; what it returns is the store. When this returns, init has.
 */
struct orrery_orbit *orrery_orbit_create(const char *name, orrery_orbit_entry entry, void *(*init)(void));
struct orrery_orbit *orrery_orbit_create_with(const char *name, orrery_orbit_entry entry, void *(*init)(void),
                                              const struct orrery_orbit_options *options);

/* Ends an orbit, whatever it is doing, and its handle. */
int orrery_orbit_destroy(struct orrery_orbit *orbit);

/* Its process id (that of the present instance), or -1. */
int orrery_orbit_pid(struct orrery_orbit *orbit);

/* 1 if it waits or works, 0 if it is dead or about to be restarted, -1 on errors. */
int orrery_orbit_alive(struct orrery_orbit *orbit);

/* Returns how often it was restarted, or -1. */
long orrery_orbit_restarts(struct orrery_orbit *orbit);

/* Whether this process is an orbit. */
int orrery_orbit_inside(void);

/* ---- areas ---- */

enum orrery_area_mode {
    ORRERY_AREA_MODE_AUTO, /* by what was written */
    ORRERY_AREA_MODE_COPY, /* main copies pages */
    ORRERY_AREA_MODE_COW   /* a forked copy of main does, if there is much to copy */
};

/* What an area should be like; begin with ORRERY_AREA_OPTIONS_INIT. */
struct orrery_area_options {
    size_t size;     /* of this structure, set by ORRERY_AREA_OPTIONS_INIT */
    int mode;        /* enum orrery_area_mode */
    size_t capacity; /* the bytes up to which it can grow; 0: plenty */
    void *address;   /* where it is to be; NULL: anywhere */
};
#define ORRERY_AREA_OPTIONS_INIT                                                                             \
    { sizeof(struct orrery_area_options), 0, 0, NULL }

/* Makes an area for any orbits, be they made before or after. It begins with `size` bytes, and grows. */
struct orrery_area *orrery_area_create(size_t size);
struct orrery_area *orrery_area_create_with(size_t size, const struct orrery_area_options *options);

/* Ends an area; its memory is gone. Calls that are under way keep what they saw. */
int orrery_area_destroy(struct orrery_area *area);

/* Memory in an area, for any thread: zeroed, aligned to 16 bytes (or to `alignment`, a power of two). */
void *orrery_area_alloc(struct orrery_area *area, size_t size);
void *orrery_area_alloc_aligned(struct orrery_area *area, size_t alignment, size_t size);

/* Changes the size of such memory, moving it if need be. After a failure it is as it was. */
void *orrery_area_realloc(struct orrery_area *area, void *memory, size_t size);

/* Frees memory of the area. A pointer that is none of this area's, or was freed before, is refused. In an orbit
 * nothing happens. */
int orrery_area_free(struct orrery_area *area, void *memory);

/* Whether an address is in the area. */
int orrery_area_contains(struct orrery_area *area, const void *address);

/*
 * For programs that lay memory out themselves: where the area is. Orbits see the first `used` bytes, as
 * orrery_area_use says, which grows the area if it has to. An area is used in this way or by orrery_area_alloc, not
 * both.
 */
void *orrery_area_base(struct orrery_area *area);
int orrery_area_use(struct orrery_area *area, size_t used);

/* Returns how many bytes orbits see. */
size_t orrery_area_used(struct orrery_area *area);

/* ---- calls ---- */

enum orrery_orbit_flags {
    ORRERY_ORBIT_NO_RETURN_VALUE =
        1, /* there is no future, and nothing is kept; orrery_orbit_call_async returns NULL with errno 0 */
    ORRERY_ORBIT_CANCELLABLE = 2,        /* later calls may cancel it while it waits */
    ORRERY_ORBIT_SKIP_SAME_ARGUMENT = 4, /* not made if one with the same function and arguments waits */
    ORRERY_ORBIT_SKIP_ANY = 8,           /* not made if any waits */
    ORRERY_ORBIT_CANCEL_SAME_ARGUMENT =
        16,                      /* cancels cancellable ones with the same function and arguments */
    ORRERY_ORBIT_CANCEL_ANY = 32 /* cancels all cancellable ones */
};

/*
 * Snapshots the areas, lets the orbit run its entry function with a copy of the arguments, and returns what that
 * returned. As a task may return -1 too, errno is 0 after success. What the task pushed is dropped.
 */
long orrery_orbit_call(struct orrery_orbit *orbit, size_t areas, struct orrery_area *const *area,
                       const void *arg, size_t size);

/* The same with another function than the entry function. */
long orrery_orbit_call_function(struct orrery_orbit *orbit, size_t areas, struct orrery_area *const *area,
                                orrery_orbit_entry function, const void *arg, size_t size);

/*
 * The same without waiting for the task: the snapshot is taken, and the call queued. `function` may be NULL for the
 * entry function, `flags` is 0 or some of enum orrery_orbit_flags. The future has to be freed.
 */
struct orrery_orbit_future *orrery_orbit_call_async(struct orrery_orbit *orbit, int flags, size_t areas,
                                                    struct orrery_area *const *area,
                                                    orrery_orbit_entry function, const void *arg,
                                                    size_t size);

/* Waits for what the task returned; errno is 0 after success. It may be asked again. */
long orrery_orbit_future_get(struct orrery_orbit_future *future);

/* The same, but for so long only; stores the value. 0, or -1 and errno, for instance ETIMEDOUT. */
int orrery_orbit_future_wait(struct orrery_orbit_future *future, unsigned milliseconds, long *value);

/* Cancels the call: 1 if the orbit had not begun it, 0 if it had. */
int orrery_orbit_future_cancel(struct orrery_orbit_future *future);

/* Destroys the future; the call runs all the same. */
void orrery_orbit_future_destroy(struct orrery_orbit_future *future);

/* ---- updates ---- */

/* A function that main calls for an update. */
typedef unsigned long (*orrery_orbit_operation)(size_t argc, unsigned long *argv);

/* Records on their way from a task to main. Its inside is the library's. */
typedef struct orrery_orbit_update {
    void *records;
} orrery_orbit_update;

enum orrery_orbit_record_type {
    ORRERY_ORBIT_RECORD_DATA = 1,
    ORRERY_ORBIT_RECORD_MODIFY,
    ORRERY_ORBIT_RECORD_OPERATION
};

/* One record of an update that arrived. */
struct orrery_orbit_record {
    enum orrery_orbit_record_type type;
    const void *data;                 /* data and modify: the bytes */
    size_t size;                      /* how many */
    void *address;                    /* modify: where they go */
    orrery_orbit_operation operation; /* operation: what to call */
    size_t argc;                      /* with how many arguments */
    const unsigned long *argv;        /* and which */
};

/* In a task: an empty update. NULL without memory. */
orrery_orbit_update *orrery_orbit_update_create(void);

/* Adds bytes for main to look at. */
int orrery_orbit_update_add_data(orrery_orbit_update *update, const void *data, size_t size);

/* Adds the wish that `size` bytes at `address` in main, in an area, should be these. */
int orrery_orbit_update_add_modify(orrery_orbit_update *update, void *address, const void *data, size_t size);

/* Adds the wish that main should call a function of the program, with up to 64 arguments. */
int orrery_orbit_update_add_operation(orrery_orbit_update *update, orrery_orbit_operation operation,
                                      size_t argc, const unsigned long *argv);

/* The same for a function of one pointer, such as pthread_cond_signal. */
int orrery_orbit_update_add_call(orrery_orbit_update *update, int (*function)(void *), void *argument);

/*
 * Sends the update to main and empties it, to be used again. It may be done several times in a task. What was sent
 * arrives even if the task crashes right after.
 */
long orrery_orbit_push(orrery_orbit_update *update);

/*
 * In main: waits for the next update of a call. 1: there is one in *update, to be freed by
 * orrery_orbit_update_destroy. 0: the call is over, and there is no more. -1: errno says why; ESRCH after the last
 * update of a task that failed.
 */
long orrery_orbit_pull(struct orrery_orbit_future *future, orrery_orbit_update *update);

/* Its records, one after the other; NULL at the end. They stay as long as the update. */
const struct orrery_orbit_record *orrery_orbit_update_first(orrery_orbit_update *update);
const struct orrery_orbit_record *orrery_orbit_update_next(orrery_orbit_update *update,
                                                           const struct orrery_orbit_record *record);

/*
 * Applies all records, or none if one of them cannot be; data is left alone. A function that it calls does not use this
 * update.
 */
int orrery_orbit_apply(orrery_orbit_update *update);

/* Applies one record. */
int orrery_orbit_apply_record(orrery_orbit_update *update, const struct orrery_orbit_record *record);

/* Frees what orrery_orbit_pull or orrery_orbit_update_create gave. */
void orrery_orbit_update_destroy(orrery_orbit_update *update);

#ifdef __cplusplus
} /* extern "C" */

#include <cstddef>
#include <cstdlib>
#include <new>

/* Programs that are built without exceptions end where others throw. */
#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define ORRERY_ORBIT_BAD_ALLOC_() throw std::bad_alloc()
#else
#define ORRERY_ORBIT_BAD_ALLOC_() std::abort()
#endif

namespace orrery {

/* For containers whose elements are in an area: std::vector<int, orrery::area_allocator<int> > v(area); */
template <class T> class area_allocator {
  public:
    typedef T value_type;
    typedef T *pointer;
    typedef const T *const_pointer;
    typedef T &reference;
    typedef const T &const_reference;
    typedef std::size_t size_type;
    typedef std::ptrdiff_t difference_type;
    template <class U> struct rebind { typedef area_allocator<U> other; };

    area_allocator(orrery_area *area) : area_(area) {}
    template <class U> area_allocator(const area_allocator<U> &other) : area_(other.area()) {}

    T *allocate(std::size_t count, const void * = 0) {
        if (count > max_size())
            ORRERY_ORBIT_BAD_ALLOC_();
        void *memory = orrery_area_alloc_aligned(area_, alignment(), count * sizeof(T));
        if (!memory)
            ORRERY_ORBIT_BAD_ALLOC_();
        return static_cast<T *>(memory);
    }
    void deallocate(T *memory, std::size_t) { orrery_area_free(area_, memory); }
    std::size_t max_size() const { return static_cast<std::size_t>(-1) / 2 / sizeof(T); }
    template <class U> void destroy(U *object) { object->~U(); }
    void construct(T *place, const T &value) { ::new (static_cast<void *>(place)) T(value); }
    orrery_area *area() const { return area_; }

    template <class U> bool operator==(const area_allocator<U> &other) const { return area_ == other.area(); }
    template <class U> bool operator!=(const area_allocator<U> &other) const { return area_ != other.area(); }

  private:
    static std::size_t alignment() {
        std::size_t alignment = 16;
        while (alignment < __alignof__(T))
            alignment *= 2;
        return alignment;
    }

    orrery_area *area_;
};

/*
 * Splits a large structure (Section 4.6.3): the fields that orbits look at go to an area, the rest stays where it
 * is, and whoever uses the structure uses the fields as before.
 *
 *     struct transaction_fields { lock *wait_lock; unsigned long version; };
 *     struct transaction : orrery::delegating<transaction_fields> {
 *         lock *&wait_lock;
 *         unsigned long &version;
 *         char much_more[4000];
 *         explicit transaction(orrery_area *area)
 *             : orrery::delegating<transaction_fields>(area), wait_lock(delegate()->wait_lock),
 *               version(delegate()->version) {}
 *     };
 *
 * A task gets transaction.delegate(). Such a structure is not copied, as its fields belong to one object.
 */
template <class Fields> class delegating {
  public:
    Fields *delegate() { return fields_; }
    const Fields *delegate() const { return fields_; }

  protected:
    explicit delegating(orrery_area *area) : area_(area), fields_(0) {
        memory place(area);
        fields_ = ::new (place.start) Fields();
        place.start = 0;
    }
    ~delegating() {
        fields_->~Fields();
        orrery_area_free(area_, fields_);
    }

  private:
    /* Frees what no constructor has finished. */
    struct memory {
        explicit memory(orrery_area *of) : area(of), start(area_allocator<Fields>(of).allocate(1)) {}
        ~memory() {
            if (start)
                orrery_area_free(area, start);
        }
        orrery_area *area;
        Fields *start;

      private:
        memory(const memory &);
        memory &operator=(const memory &);
    };

    delegating(const delegating &);
    delegating &operator=(const delegating &);

    orrery_area *area_;
    Fields *fields_;
};

} // namespace orrery

#undef ORRERY_ORBIT_BAD_ALLOC_

#endif

#endif
