/*
 * Orrery: orbits, auxiliary tasks in an address space of their own.
 *
 *     struct orbit_area *area = orbit_area_create(4096);
 *     struct orbit *checker = orbit_create("checker", check, NULL);
 *     struct table *table = orbit_alloc(area, sizeof(*table));
 *     ...
 *     struct check_args args = {table};
 *     long broken = orbit_call(checker, 1, &area, &args, sizeof(args));
 *     if (broken < 0)
 *         warnx("no check this time: %s", orbit_error()); // crashed, hung, killed: the program goes on
 *
 *     long check(void *argbuf, void *store)   // runs in the orbit, and sees *table as it was at the call
 *     {
 *         struct table *table = ((struct check_args *)argbuf)->table;
 *         ...
 *     }
 *
 * Link with -lorrery. From "Operating System Support for Safe and Efficient Auxiliary Execution" (Jing and Huang, OSDI
 * 2022), Table 1 and Figures 4, 7, 11, on a stock Linux kernel. Programs ported to the authors' library take
 * "orbit/orbit.h".
 *
 * WHAT A TASK SEES
 *
 * The areas that the call names, at the same addresses, as they were when the call was made: all changes since the last
 * call are copied page by page while orbit_call or orbit_call_async runs, and main may change everything as soon as that
 * returns. Threads of main that write meanwhile have to be kept out by the lock that protects the data anyway. Everything
 * else (globals, the heap, files) a task has as it was when the orbit was created. What a task writes to an area is its own
 * copy, and gone with the next task. What it keeps elsewhere stays until the orbit ends: the store that the init function
 * returned is for that.
 *
 * COSTS
 *
 * A synchronous call takes some 10 us. A call pays 0.2 us for each MiB in use of the areas that it names and 0.4 us for each
 * page that was written since the last call; main pays 0.6 us for the first write to a page after a call.
 *
 * FAULTS
 *
 * A task that crashes, exits, runs too long or takes too much memory ends its orbit. The call fails with ESRCH, orbit_error
 * says what happened, and what the task had pushed before still arrives. By the restart policy the orbit comes back and
 * runs its init function again; with no policy every later call fails with EINVAL.
 *
 * PROCESSES
 *
 * An orbit is a child process. Unless `reaper` is ORBIT_REAP_PROGRAM it sends no SIGCHLD that matters: the library takes
 * its status. Orbits belong to the process that made them; in a forked child they fail with ECHILD. Areas may be used there,
 * and by orbits that the child makes.
 *
 * ERRORS
 *
 * Calls that fail return -1 or NULL, set errno, and have changed nothing; orbit_error tells more.
 *
 *   EINVAL     a handle that is none (any more), a pointer outside of the area, a function that is none, 1,024 bytes of
 *              arguments or more, an orbit that is dead for good
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

#ifdef ORRERY_AUTHORS_ORBIT_H
#error "<orrery/orbit.h> and the orbit authors' orbit.h do not mix in one source file"
#endif

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct orbit;
struct orbit_area;
struct orbit_future;

/* What an orbit runs: its own copy of the arguments (aligned to 64 bytes), and its store. */
typedef long (*orbit_entry)(void *argbuf, void *store);

/* The text of the last failure of this thread, or NULL. It stays until the next failure. */
const char *orbit_error(void);

/* ---- orbits ---- */

enum orbit_restart {
    ORBIT_RESTART_NEVER,
    ORBIT_RESTART_ON_CRASH, /* with growing pauses, and not for ever if it fails again and again: see below */
    ORBIT_RESTART_ALWAYS    /* after an orderly exit, too */
};

enum orbit_when_full {
    ORBIT_FULL_WAIT_A_SECOND, /* then fail */
    ORBIT_FULL_WAIT,
    ORBIT_FULL_FAIL,
    ORBIT_FULL_CANCEL_OLDEST /* cancellable call */
};

enum orbit_reaper { ORBIT_REAP_LIBRARY, ORBIT_REAP_PROGRAM };

/* What an orbit should be like. Zero means "as usual" everywhere; begin with ORBIT_OPTIONS_INIT. */
struct orbit_options {
    size_t size;            /* of this structure, set by ORBIT_OPTIONS_INIT */
    int restart;            /* enum orbit_restart */
    int when_full;          /* enum orbit_when_full */
    int reaper;             /* enum orbit_reaper; ORBIT_REAP_PROGRAM only goes with ORBIT_RESTART_NEVER */
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
    unsigned restart_limit;      /* in a row; 10, or ORBIT_RESTART_WITHOUT_LIMIT */
    unsigned backoff_first_ms;   /* the wait before the second restart; 10 */
    unsigned backoff_longest_ms; /* the longest wait; 5,000 */
    unsigned healthy_after_ms;   /* how long it has to live for a new row; 10,000 */
};
#define ORBIT_RESTART_WITHOUT_LIMIT (~0u)
#define ORBIT_OPTIONS_INIT                                                                                   \
    { sizeof(struct orbit_options), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/*
 * Makes an orbit with a name (1 to 50 characters) that runs `entry` for each call. `init`, if there is one, runs in the
 * orbit first; what it returns is the store. When this returns, init has.
 */
struct orbit *orbit_create(const char *name, orbit_entry entry, void *(*init)(void));
struct orbit *orbit_create_with(const char *name, orbit_entry entry, void *(*init)(void),
                                const struct orbit_options *options);

/* Ends an orbit, whatever it is doing, and its handle. */
int orbit_destroy(struct orbit *orbit);

/* Its process id (that of the present instance), or -1. */
int orbit_pid(struct orbit *orbit);

/* 1 if it waits or works, 0 if it is dead or about to be restarted, -1 on errors. */
int orbit_alive(struct orbit *orbit);

/* How often it was restarted. */
long orbit_restarts(struct orbit *orbit);

/* Whether this process is an orbit. */
int orbit_inside(void);

/* ---- areas ---- */

enum orbit_mode {
    ORBIT_MODE_AUTO, /* by what was written */
    ORBIT_MODE_COPY, /* main copies pages */
    ORBIT_MODE_COW   /* a forked copy of main does, if there is much to copy */
};

/* What an area should be like; begin with ORBIT_AREA_OPTIONS_INIT. */
struct orbit_area_options {
    size_t size;     /* of this structure, set by ORBIT_AREA_OPTIONS_INIT */
    int mode;        /* enum orbit_mode */
    size_t capacity; /* the bytes up to which it can grow; 0: plenty */
    void *address;   /* where it is to lie; NULL: anywhere */
};
#define ORBIT_AREA_OPTIONS_INIT                                                                              \
    { sizeof(struct orbit_area_options), 0, 0, NULL }

/* Makes an area for any orbits, be they made before or after. It begins with `size` bytes, and grows. */
struct orbit_area *orbit_area_create(size_t size);
struct orbit_area *orbit_area_create_with(size_t size, const struct orbit_area_options *options);

/* Ends an area; its memory is gone. Calls that are under way keep what they saw. */
int orbit_area_destroy(struct orbit_area *area);

/* Memory in an area, for any thread: zeroed, aligned to 16 bytes (or to `alignment`, a power of two). */
void *orbit_alloc(struct orbit_area *area, size_t size);
void *orbit_alloc_aligned(struct orbit_area *area, size_t alignment, size_t size);

/* Changes the size of such memory, moving it if need be. After a failure it is as it was. */
void *orbit_realloc(struct orbit_area *area, void *memory, size_t size);

/* Gives it back. A pointer that is none of this area's, or was given back, is refused. In an orbit nothing happens. */
int orbit_free(struct orbit_area *area, void *memory);

/* Whether an address lies in the area. */
int orbit_area_contains(struct orbit_area *area, const void *address);

/*
 * For programs that lay memory out themselves: where the area lies. Orbits see the first `used` bytes, as orbit_area_use
 * says, which grows the area if it has to. An area is used in this way or by orbit_alloc, not both.
 */
void *orbit_area_base(struct orbit_area *area);
int orbit_area_use(struct orbit_area *area, size_t used);

/* How many bytes orbits see. */
size_t orbit_area_used(struct orbit_area *area);

/* ---- calls ---- */

enum orbit_flags {
    ORBIT_NO_RETURN_VALUE =
        1, /* there is no future, and nothing is kept; orbit_call_async returns NULL with errno 0 */
    ORBIT_CANCELLABLE = 2,           /* later calls may cancel it while it waits */
    ORBIT_SKIP_SAME_ARGUMENT = 4,    /* not made if one with the same function and arguments waits */
    ORBIT_SKIP_ANY = 8,              /* not made if any waits */
    ORBIT_CANCEL_SAME_ARGUMENT = 16, /* cancels cancellable ones with the same function and arguments */
    ORBIT_CANCEL_ANY = 32            /* cancels all cancellable ones */
};

/*
 * Snapshots the areas, lets the orbit run its entry function with a copy of the arguments, and returns what that returned.
 * As a task may return -1 too, errno is 0 after success. What the task pushed is dropped.
 */
long orbit_call(struct orbit *orbit, size_t areas, struct orbit_area *const *area, const void *arg,
                size_t size);

/* The same with another function than the entry function. */
long orbit_call_function(struct orbit *orbit, size_t areas, struct orbit_area *const *area,
                         orbit_entry function, const void *arg, size_t size);

/*
 * The same without waiting for the task: the snapshot is taken, and the call queued. `function` may be NULL for the entry
 * function, `flags` is 0 or some of enum orbit_flags. The future has to be freed.
 */
struct orbit_future *orbit_call_async(struct orbit *orbit, int flags, size_t areas,
                                      struct orbit_area *const *area, orbit_entry function, const void *arg,
                                      size_t size);

/* Waits for what the task returned; errno is 0 after success. It may be asked again. */
long orbit_future_get(struct orbit_future *future);

/* The same, but for so long only; stores the value. 0, or -1 and errno, for instance ETIMEDOUT. */
int orbit_future_wait(struct orbit_future *future, unsigned milliseconds, long *value);

/* Cancels the call: 1 if the orbit had not begun it, 0 if it had. */
int orbit_future_cancel(struct orbit_future *future);

/* Forgets the call, which runs all the same. */
void orbit_future_free(struct orbit_future *future);

/* ---- updates ---- */

/* A function that main calls for an update. */
typedef unsigned long (*orbit_operation)(size_t argc, unsigned long *argv);

/* Records on their way from a task to main. Its inside is the library's. */
typedef struct orbit_update {
    void *records;
} orbit_update;

enum orbit_record_type { ORBIT_RECORD_DATA = 1, ORBIT_RECORD_MODIFY, ORBIT_RECORD_OPERATION };

/* One record of an update that arrived. */
struct orbit_record {
    enum orbit_record_type type;
    const void *data;          /* data and modify: the bytes */
    size_t size;               /* how many */
    void *address;             /* modify: where they go */
    orbit_operation operation; /* operation: what to call */
    size_t argc;               /* with how many arguments */
    const unsigned long *argv; /* and which */
};

/* In a task: an empty update. NULL without memory. */
orbit_update *orbit_update_create(void);

/* Adds bytes for main to look at. */
int orbit_update_add_data(orbit_update *update, const void *data, size_t size);

/* Adds the wish that `size` bytes at `address` in main, in an area, should be these. */
int orbit_update_add_modify(orbit_update *update, void *address, const void *data, size_t size);

/* Adds the wish that main should call a function of the program, with up to 64 arguments. */
int orbit_update_add_operation(orbit_update *update, orbit_operation operation, size_t argc,
                               const unsigned long *argv);

/* The same for a function of one pointer, such as pthread_cond_signal. */
int orbit_update_add_call(orbit_update *update, int (*function)(void *), void *argument);

/*
 * Sends the update to main and empties it, to be used again. It may be done several times in a task. What was sent arrives
 * even if the task crashes right after.
 */
long orbit_push(orbit_update *update);

/*
 * In main: waits for the next update of a call. 1: there is one in *update, to be freed by orbit_update_free. 0: the call is
 * over, and there is no more. -1: errno says why; ESRCH after the last update of a task that failed.
 */
long pull_orbit(struct orbit_future *future, orbit_update *update);

/* Its records, one after the other; NULL at the end. They stay as long as the update. */
const struct orbit_record *orbit_update_first(orbit_update *update);
const struct orbit_record *orbit_update_next(orbit_update *update, const struct orbit_record *record);

/* Applies all records, or none if one of them cannot be; data is left alone. */
int orbit_apply(orbit_update *update);

/* Applies one record. */
int orbit_apply_record(orbit_update *update, const struct orbit_record *record);

/* Frees what pull_orbit or orbit_update_create gave. */
void orbit_update_free(orbit_update *update);

#ifdef __cplusplus
} /* extern "C" */

#include <cstddef>
#include <new>

namespace orrery {

/* For containers whose elements lie in an area: std::vector<int, orrery::area_allocator<int> > v(area); */
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

    area_allocator(orbit_area *area) : area_(area) {}
    template <class U> area_allocator(const area_allocator<U> &other) : area_(other.area()) {}

    T *allocate(std::size_t count, const void * = 0) {
        if (count > max_size())
            throw std::bad_alloc();
        void *memory = orbit_alloc_aligned(area_, alignment(), count * sizeof(T));
        if (!memory)
            throw std::bad_alloc();
        return static_cast<T *>(memory);
    }
    void deallocate(T *memory, std::size_t) { orbit_free(area_, memory); }
    std::size_t max_size() const { return static_cast<std::size_t>(-1) / 2 / sizeof(T); }
    template <class U> void destroy(U *object) { object->~U(); }
    void construct(T *place, const T &value) { ::new (static_cast<void *>(place)) T(value); }
    orbit_area *area() const { return area_; }

    template <class U> bool operator==(const area_allocator<U> &other) const { return area_ == other.area(); }
    template <class U> bool operator!=(const area_allocator<U> &other) const { return area_ != other.area(); }

  private:
    static std::size_t alignment() {
        std::size_t alignment = 16;
        while (alignment < __alignof__(T))
            alignment *= 2;
        return alignment;
    }

    orbit_area *area_;
};

/*
 * Splits a large structure (Section 4.6.3): the fields that orbits look at go to an area, the rest stays where it is, and
 * whoever uses the structure uses the fields as before.
 *
 *     struct transaction_fields { lock *wait_lock; unsigned long version; };
 *     struct transaction : orrery::delegating<transaction_fields> {
 *         lock *&wait_lock;
 *         unsigned long &version;
 *         char much_more[4000];
 *         explicit transaction(orbit_area *area)
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
    explicit delegating(orbit_area *area) : area_(area), fields_(0) {
        void *place = area_allocator<Fields>(area).allocate(1);
        try {
            fields_ = ::new (place) Fields();
        } catch (...) {
            orbit_free(area_, place);
            throw;
        }
    }
    ~delegating() {
        fields_->~Fields();
        orbit_free(area_, fields_);
    }

  private:
    delegating(const delegating &);
    delegating &operator=(const delegating &);

    orbit_area *area_;
    Fields *fields_;
};

} // namespace orrery

#endif

#endif
