/*
 * Orrery: sessions. A pool of contexts of which each serves one connection at a time, with memory and descriptors
 * of its own, and is rolled back before the next one.
 *
 *     static void serve(int connection, void *with) {      // in a session, as if it were alone
 *         char request[512];
 *         ssize_t length;
 *         while ((length = lw_session_read(connection, request, sizeof request)) > 0)
 *             lw_session_write(connection, request, length);
 *     }
 *
 *     struct lw_sessions *pool = lw_sessions_open(NULL, serve, NULL);
 *     if (!pool)
 *         errx(1, "lw_sessions_open: %s", lw_error());
 *     lw_sessions_serve(pool, listener, -1);                // or a loop of one's own: examples/sessions
 *
 * Link with -lorrery. From Algorithm 2 of "Light-Weight Contexts" (Litton et al., OSDI 2016). lw_error
 * (orrery/lwc.h) says in words what went wrong.
 *
 * ROOT, TEMPLATE, SESSIONS
 *
 * The root is the program: it accepts connections and waits until they are ready; it need not read what they
 * send. lw_sessions_open copies it into a template, which then never changes; sessions are copies of that. So
 * they see neither the root's later memory, nor each other's, nor what those before them did. Of its descriptors
 * they have 0, 1, 2, those that you name, and their connection.
 *
 * A session goes on until it would block; lw_session_wait (and with it lw_session_read, lw_session_write) gives
 * control back to the root. lw_session_step lets it go on. When it returns, its context is dirty, until
 * lw_sessions_tidy or the need for it has it rolled back (orrery/lwc.h tells what that undoes).
 *
 * The program has one thread when the pool is opened, and uses it on that thread. A process that it forks has no
 * pool: fork workers first, and let each open its own.
 *
 * ERRORS
 *
 * Calls that fail return -1, or a null pointer, and set errno. Beside those listed at each call:
 *
 *   EINVAL      an argument that must not be null is, or means nothing
 *   EOWNERDEAD  the template was killed: sessions that there are go on, new contexts cannot be made
 *   ENOTSUP     sessions cannot be rolled back here; lw_error tells why
 *   others      those of orrery/context.h, and what a system call answered: EMFILE, ENOMEM ...
 */
#ifndef ORRERY_SESSIONS_H
#define ORRERY_SESSIONS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* For what a session waits; both may be. */
#define LW_SESSION_READ 0x1  /* something to read, or the end of it */
#define LW_SESSION_WRITE 0x2 /* room to write */

/* How a session ended, in struct lw_session_end. Contexts of the first five serve again. */
#define LW_END_RETURNED 1
#define LW_END_PANICKED 2  /* a panic in Rust code */
#define LW_END_EXITED 3    /* it called exit; value is the status. The program goes on */
#define LW_END_MEMORY 4    /* it reached its memory limit, and died of that */
#define LW_END_ABANDONED 5 /* lw_session_end */
#define LW_END_SIGNALED 6  /* value is the signal */
#define LW_END_TIMED_OUT 7 /* it kept control for too long */
#define LW_END_LOST 8      /* it was killed, or left what cannot be undone */

/* A pool. */
struct lw_sessions;

/* What sessions do. The connection is in non-blocking mode, and closed when the session ends. */
typedef void lw_session_function(int connection, void *with);

/* Settings; 0 everywhere stands for the defaults, as does a null pointer to them. */
struct lw_sessions_settings {
    unsigned ready;        /* contexts that are made at once; 0: 4 */
    unsigned most;         /* contexts at most; 0: 1024 */
    unsigned spare;        /* clean contexts that lw_sessions_tidy sees to; 0: 2 */
    unsigned step_limit;   /* milliseconds that a session may have control at a time; 0: no limit */
    uint64_t memory_limit; /* bytes by which it may grow its private writable memory; 0: no limit */
    const int *keep;       /* descriptors that sessions have */
    size_t keep_count;     /* how many */
    int greets; /* lw_sessions_serve: sessions begin at once, not when the client has sent something */
};

/* How a session ended. */
struct lw_session_end {
    int how;
    int value;
};

/* What a pool has, and what it has done. */
struct lw_sessions_counts {
    uint64_t clean, busy, dirty;             /* contexts */
    uint64_t begun, made, rolled_back, lost; /* so far; begun counts sessions, the others contexts */
};

/* Makes a pool, whose sessions call serve(connection, with). Null on failure. */
struct lw_sessions *lw_sessions_open(const struct lw_sessions_settings *settings, lw_session_function *serve,
                                     void *with);

/* Begins a session, stores its name, and lets it go on until it waits: returns for what. 0: it has ended, and
 * *end (unless null) tells how. The connection remains the caller's, who waits for it, and closes it when the
 * session has ended. Remove it from an epoll instance before: a dirty context may have a copy.
 *
 *   EAGAIN  as many contexts as may be are in use
 *   EMFILE  the session has no number free for its descriptor */
int lw_session_begin(struct lw_sessions *pool, int connection, uint64_t *session, struct lw_session_end *end);

/* Lets a session go on that waits. Returns as lw_session_begin.
 *
 *   ENOENT  it has ended before */
int lw_session_step(struct lw_sessions *pool, uint64_t session, struct lw_session_end *end);

/* Ends a session that waits. ENOENT: it has ended before. */
int lw_session_end(struct lw_sessions *pool, uint64_t session);

/* Does one thing that will have to be done: rolls a dirty context back, or makes one where few are clean. 1: it
 * did, and there may be more; 0: there is nothing to do. For when nothing else is. */
int lw_sessions_tidy(struct lw_sessions *pool);

/* Serves connections to a listener, until stop is readable (-1: for ever). When all contexts are in use, clients
 * wait in the listener's backlog. */
int lw_sessions_serve(struct lw_sessions *pool, int listener, int stop);

/* Tells the counts. */
int lw_sessions_count(const struct lw_sessions *pool, struct lw_sessions_counts *counts);

/* Ends all sessions and the pool. */
void lw_sessions_close(struct lw_sessions *pool);

/* In a session: lets others go on until the connection is ready, or seems so: try again, and wait again. -1 with
 * EINVAL outside of a session. It does not return where the root ends the session. */
int lw_session_wait(int events);

/* In a session: read(2) and write(2) that wait; the latter until all is written. -1 with the errno of those. */
ssize_t lw_session_read(int connection, void *buffer, size_t room);
ssize_t lw_session_write(int connection, const void *bytes, size_t length);

#ifdef __cplusplus
}
#endif

#endif
