/*
 * The event loop with a session for each connection: Algorithm 2 of "Light-Weight Contexts" (OSDI 2016).
 * orrery_session_pool_serve is such a loop, too; this one is written out.
 */
#include "notes.h"
#include "server.h"

#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <orrery/rollback.h>
#include <orrery/session.h>

/* A connection whose session waits for it. */
struct client {
    int connection;
    uint64_t session;
    int waits;
};

static int ready;
/* No connection is accepted while there is no session for it. */
static int listening = 1;

/*
 * In a session: serves one client as if there were no others. Everything here, and all that the C library does
 * for it, is this session's own, and gone with it.
 */
static void serve(int connection, void *unused) {
    (void)unused;
    struct notes notes = {0};
    char line[LINE];
    size_t length = 0;
    for (;;) {
        ssize_t got = orrery_session_read(connection, line + length, LINE - 1 - length);
        if (got <= 0)
            return;
        length += (size_t)got;
        char *end;
        while ((end = memchr(line, '\n', length))) {
            size_t bytes;
            *end = 0;
            const char *answer = notes_answer(&notes, line, &bytes);
            if (orrery_session_write(connection, answer, bytes) < 0)
                return;
            length -= (size_t)(end + 1 - line);
            memmove(line, end + 1, length);
        }
        if (length == LINE - 1)
            return;
    }
}

static void listen_to(int listener, int yes) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (listening != yes &&
        epoll_ctl(ready, EPOLL_CTL_MOD, listener, yes ? &event : &(struct epoll_event){0}) < 0)
        err(1, "epoll_ctl");
    listening = yes;
}

/* What the session said when it gave control back. */
static void note(struct client *client, int waits, const struct orrery_session_result *end) {
    if (waits > 0) {
        int action = client->waits == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
        uint32_t events =
            (waits & ORRERY_SESSION_READ ? EPOLLIN : 0) | (waits & ORRERY_SESSION_WRITE ? EPOLLOUT : 0);
        struct epoll_event event = {.events = events, .data.ptr = client};
        if (client->waits != waits && epoll_ctl(ready, action, client->connection, &event) < 0)
            err(1, "epoll_ctl");
        client->waits = waits;
        return;
    }
    if (waits < 0)
        warnx("a session: %s", orrery_last_error());
    else if (end->how == ORRERY_SESSION_SIGNALED)
        warnx("a session died of signal %d; the others go on", end->value);
    if (client->waits)
        epoll_ctl(ready, EPOLL_CTL_DEL, client->connection, NULL);
    close(client->connection);
    free(client);
}

static void welcome(struct orrery_session_pool *pool, int listener) {
    struct orrery_session_result end;
    struct orrery_session_counts counts;
    int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    struct client *client = connection < 0 ? NULL : calloc(1, sizeof *client);
    if (!client) {
        if (connection >= 0)
            close(connection);
        return;
    }
    client->connection = connection;
    note(client, orrery_session_begin(pool, connection, &client->session, &end), &end);
    /* The next one waits in the backlog until it can be served. */
    if (orrery_session_pool_count(pool, &counts) == 0 && counts.clean + counts.dirty == 0)
        listen_to(listener, orrery_session_pool_maintain(pool) > 0);
}

void serve_in_sessions(int listener, unsigned at_once, unsigned most) {
    struct orrery_session_options options = ORRERY_SESSION_OPTIONS_INIT;
    options.initial = at_once;
    options.max_contexts = most;
    options.spare = 1;
    options.step_limit_ms = 1000;
    struct orrery_session_pool *pool = orrery_session_pool_create(&options, serve, NULL);
    if (!pool)
        errx(1, "orrery_session_pool_create: %s", orrery_last_error());
    ready = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (ready < 0 || epoll_ctl(ready, EPOLL_CTL_ADD, listener, &event) < 0)
        err(1, "epoll");
    for (int idle = 0;;) {
        struct epoll_event events[64];
        int count = epoll_wait(ready, events, 64, idle ? -1 : 0);
        if (count <= 0)
            idle = orrery_session_pool_maintain(pool) <= 0;
        for (int i = 0; i < count; i++) {
            struct client *client = events[i].data.ptr;
            idle = 0;
            if (!client) {
                welcome(pool, listener);
                continue;
            }
            struct orrery_session_result end;
            int waits = orrery_session_step(pool, client->session, &end);
            note(client, waits, &end);
            if (waits <= 0)
                listen_to(listener, 1);
        }
    }
}
