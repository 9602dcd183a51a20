/* The event loop as it mostly is: one memory for all. */
#include "notes.h"
#include "server.h"

#include <err.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

struct client {
    int connection;
    struct notes notes;
    char line[LINE];
    size_t length;
};

static void leave(struct client *client) {
    close(client->connection);
    notes_forget(&client->notes);
    free(client);
}

/* Answers the lines that are there; 0 when the client is gone. */
static int go_on(struct client *client) {
    ssize_t got = recv(client->connection, client->line + client->length, LINE - 1 - client->length, 0);
    if (got <= 0)
        return got < 0 && (errno == EAGAIN || errno == EINTR);
    client->length += (size_t)got;
    char *end;
    while ((end = memchr(client->line, '\n', client->length))) {
        size_t length;
        *end = 0;
        const char *answer = notes_answer(&client->notes, client->line, &length);
        /* A plain server would keep what does not fit at once; here it is enough. */
        if (send(client->connection, answer, length, MSG_NOSIGNAL) < 0)
            return 0;
        size_t used = (size_t)(end + 1 - client->line);
        client->length -= used;
        memmove(client->line, end + 1, client->length);
    }
    return client->length < LINE - 1;
}

void serve_plainly(int listener) {
    int ready = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (ready < 0 || epoll_ctl(ready, EPOLL_CTL_ADD, listener, &event) < 0)
        err(1, "epoll");
    for (;;) {
        struct epoll_event events[64];
        int count = epoll_wait(ready, events, 64, -1);
        for (int i = 0; i < count; i++) {
            struct client *client = events[i].data.ptr;
            if (client) {
                if (!go_on(client))
                    leave(client);
                continue;
            }
            int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (connection < 0)
                continue;
            client = calloc(1, sizeof *client);
            if (!client)
                err(1, "malloc");
            client->connection = connection;
            event = (struct epoll_event){.events = EPOLLIN, .data.ptr = client};
            if (epoll_ctl(ready, EPOLL_CTL_ADD, connection, &event) < 0)
                leave(client);
        }
    }
}
