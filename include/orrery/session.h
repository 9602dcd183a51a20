/*
 * Orrery: sessions. A pool of contexts of which each serves one connection at a time, with memory and descriptors
 * of its own, and is rolled back before the next one.
 *
 *     static void serve(int connection, void *with) {      // in a session, as if it were alone
 *         char request[512];
 *         ssize_t length;
 *         while ((length = orrery_session_read(connection, request, sizeof request)) > 0)
 *             orrery_session_write(connection, request, length);
 *     }
 *
 *     struct orrery_session_pool *pool = orrery_session_pool_create(NULL, serve, NULL);
 *     if (!pool)
 *         errx(1, "orrery_session_pool_create: %s", orrery_last_error());
 *     orrery_session_pool_serve(pool, listener, -1);                // or a loop of one's own: examples/sessions
 *
 * Link with -lorrery. From Algorithm 2 of "Light-Weight Contexts" (Litton et al., OSDI 2016). orrery_last_error
 * (orrery/rollback.h) says in words what went wrong.
 *
 * ROOT, TEMPLATE, SESSIONS
 *
 * The root is the program: it accepts connections and waits until they are ready; it need not read what they
 * send. orrery_session_pool_create copies it into a template, which then never changes; sessions are copies of that.
 * So they see neither the root's later memory, nor each other's, nor what those before them did. Of its descriptors
 * they have 0, 1, 2, those that you name, and their connection.
 *
 * A session goes on until it would block; orrery_session_wait (and with it orrery_session_read,
 * orrery_session_write) gives control back to the root. orrery_session_step lets it go on. When it returns, its
 * context is dirty, until orrery_session_pool_maintain or the need for it has it rolled back (orrery/rollback.h
 * says what that undoes).
 *
 * The program has one thread when the pool is opened, and uses it on that thread. A process that it forks has no
 * pool: fork workers first, and let each open its own.
 *
 * ERRORS
 *
 * Calls that fail return -1, or a null pointer, and set errno. Beside those listed at each call:
 *
 *   EINVAL      an argument is null that must not be, or has no meaning; options without their size
 *   E2BIG       options with members that this version of the library does not know
 *   EOWNERDEAD  the template was killed: sessions that there are go on, new contexts cannot be made
 *   ENOTSUP     sessions cannot be rolled back here; orrery_last_error returns the reason
 *   others      those of orrery/context.h, and what a system call answered: EMFILE, ENOMEM ...
 */
#ifndef ORRERY_SESSION_H
#define ORRERY_SESSION_H

#include <orrery/error.h>

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* For what a session waits; both may be. */
#define ORRERY_SESSION_READ 0x1  /* something to read, or the end of it */
#define ORRERY_SESSION_WRITE 0x2 /* room to write */

/* How a session ended, in struct orrery_session_result. Contexts of the first five serve again. */
#define ORRERY_SESSION_RETURNED 1
#define ORRERY_SESSION_PANICKED 2      /* a panic in Rust code */
#define ORRERY_SESSION_EXITED 3        /* it called exit; value is the status. The program goes on */
#define ORRERY_SESSION_OUT_OF_MEMORY 4 /* it reached its memory limit, and died of that */
#define ORRERY_SESSION_ABANDONED 5     /* orrery_session_abandon */
#define ORRERY_SESSION_SIGNALED 6      /* value is the signal */
#define ORRERY_SESSION_TIMED_OUT 7     /* it kept control for too long */
#define ORRERY_SESSION_LOST 8          /* it was killed, or left what cannot be undone */

/* A pool. */
struct orrery_session_pool;

/* What sessions do. The connection is in non-blocking mode, and closed when the session ends. */
typedef void orrery_session_function(int connection, void *with);

/*
 * Options of a pool, initialised by ORRERY_SESSION_OPTIONS_INIT. A null pointer, and 0 in each member but size,
 * stand for the defaults.
 */
struct orrery_session_options {
    size_t size;            /* of this structure, set by ORRERY_SESSION_OPTIONS_INIT */
    unsigned initial;       /* contexts that are created with the pool; 0: 4 */
    unsigned max_contexts;  /* contexts at most; 0: 1024 */
    unsigned spare;         /* clean contexts that orrery_session_pool_maintain provides; 0: 2 */
    unsigned step_limit_ms; /* milliseconds that a session may have control at a time; 0: no limit */
    uint64_t memory_limit;  /* bytes by which it may grow its private writable memory; 0: no limit */
    const int *fds;         /* file descriptors that sessions have beside 0, 1, 2 and their connection */
    size_t fd_count;        /* how many */
    int start_at_once; /* orrery_session_pool_serve: start sessions before the client has sent anything */
    int not_isolated;  /* sessions may reach the root as a process of its user may; 0: isolated, Linux 6.12 */
};
#define ORRERY_SESSION_OPTIONS_INIT                                                                          \
    { sizeof(struct orrery_session_options), 0, 0, 0, 0, 0, NULL, 0, 0, 0 }

/* How a session ended. */
struct orrery_session_result {
    int how;
    int value;
};

/* What a pool has, and what it has done. */
struct orrery_session_counts {
    uint64_t clean, busy, dirty;             /* contexts */
    uint64_t begun, made, rolled_back, lost; /* so far; begun counts sessions, the others contexts */
};

/* Creates a pool, whose sessions call serve(connection, with). Returns NULL on failure. */
struct orrery_session_pool *orrery_session_pool_create(const struct orrery_session_options *options,
                                                       orrery_session_function *serve, void *with);

/* Begins a session, stores its name, and lets it go on until it waits: returns for what. 0: it has ended, and
 * *end (unless null) says how. The connection remains the caller's, who waits for it, and closes it when the
 * session has ended. Remove it from an epoll instance before: a dirty context may have a copy.
 *
 *   EAGAIN  as many contexts as may be are in use
 *   EMFILE  the session has no number free for its descriptor */
int orrery_session_begin(struct orrery_session_pool *pool, int connection, uint64_t *session,
                         struct orrery_session_result *end);

/* Continues a session that waits. Returns the same as orrery_session_begin.
 *
 *   ENOENT  it has ended before */
int orrery_session_step(struct orrery_session_pool *pool, uint64_t session,
                        struct orrery_session_result *end);

/* Ends a session that waits. ENOENT: it has ended before. */
int orrery_session_abandon(struct orrery_session_pool *pool, uint64_t session);

/* Does one thing that will have to be done: rolls a dirty context back, or makes one where few are clean. 1: it
 * did, and there may be more; 0: there is nothing to do. For when nothing else is. */
int orrery_session_pool_maintain(struct orrery_session_pool *pool);

/* Serves connections to a listener, until stop is readable (-1: for ever). When all contexts are in use, clients
 * wait in the listener's backlog. */
int orrery_session_pool_serve(struct orrery_session_pool *pool, int listener, int stop);

/* Stores the counts of the pool in *counts. */
int orrery_session_pool_count(const struct orrery_session_pool *pool, struct orrery_session_counts *counts);

/* Ends all sessions and destroys the pool. orrery_session_pool_destroy(NULL) is a no-op. */
void orrery_session_pool_destroy(struct orrery_session_pool *pool);

/* In a session: lets others go on until the connection is ready, or seems so: try again, and wait again. -1 with
 * EINVAL outside of a session. It does not return where the root ends the session. */
int orrery_session_wait(int events);

/* In a session: read(2) and write(2) that wait; the latter until all is written. -1 with the errno of those. */
ssize_t orrery_session_read(int connection, void *buffer, size_t room);
ssize_t orrery_session_write(int connection, const void *bytes, size_t length);

#ifdef __cplusplus
}
#endif

#endif
