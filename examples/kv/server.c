#include "server.h"

#include <err.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "clock.h"
#include "commands.h"
#include "orbits.h"
#include "protocol.h"
#include "settings.h"

#define EVENTS 128
#define READ_SIZE ((size_t)64 << 10)

/* A client that does not read its replies is not served beyond this, */
#define UNREAD ((size_t)16 << 20)

/* and one that sends more than this without being served is sent away. */
#define UNSERVED ((size_t)1 << 30)

#define TICK_MICROSECONDS 50000
#define GLANCE_MICROSECONDS 1000

static int poller, unix_listener = -1, tcp_listener = -1, signals;
static struct client *clients;
static size_t client_count;
static uint64_t next_id = 1;
static bool stopping;
static int64_t begun;

struct client *server_clients(void) {
    return clients;
}
size_t server_client_count(void) { return client_count; }
int64_t server_uptime_seconds(void) { return (clock_microseconds() - begun) / 1000000; }
void server_stop(void) { stopping = true; }

struct client *server_client(uint64_t id) {
    struct client *client = clients;
    while (client && client->id != id)
        client = client->next;
    return client;
}

static void watch(int fd, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event) < 0)
        err(1, "epoll_ctl");
}

static int listen_unix(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        errx(1, "%s: too long for a socket's name", path);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    unlink(path);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 511) < 0)
        err(1, "%s", path);
    return fd;
}

static int listen_tcp(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(fd, (struct sockaddr *)&address, size) < 0 || listen(fd, 511) < 0 ||
        getsockname(fd, (struct sockaddr *)&address, &size) < 0)
        err(1, "port %d", port);
    printf("listening on port %d\n", ntohs(address.sin_port));
    return fd;
}

void server_listen(void) {
    begun = clock_microseconds();
    poller = epoll_create1(EPOLL_CLOEXEC);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGINT);
    sigaddset(&set, SIGTERM);
    if (poller < 0 || sigprocmask(SIG_BLOCK, &set, NULL) < 0 ||
        (signals = signalfd(-1, &set, SFD_NONBLOCK | SFD_CLOEXEC)) < 0)
        err(1, "cannot make the event loop");
    watch(signals, &signals);
    if (settings.socket) {
        unix_listener = listen_unix(settings.socket);
        watch(unix_listener, &unix_listener);
    }
    if (settings.port >= 0) {
        tcp_listener = listen_tcp(settings.port);
        watch(tcp_listener, &tcp_listener);
    }
    printf("ready\n");
    fflush(stdout);
}

static void greet(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct client *client = calloc(1, sizeof *client);
        if (!client)
            err(1, "a client");
        if (listener == tcp_listener) {
            int yes = 1;
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        }
        client->id = next_id++;
        client->fd = fd;
        client->next = clients;
        clients = client;
        client_count++;
        watch(fd, client);
    }
}

static void part(struct client *client) {
    struct client **link = &clients;
    while (*link != client)
        link = &(*link)->next;
    *link = client->next;
    client_count--;
    /* A forked dump may have the connection, too: end it for both. */
    epoll_ctl(poller, EPOLL_CTL_DEL, client->fd, NULL);
    shutdown(client->fd, SHUT_RDWR);
    close(client->fd);
    buffer_free(&client->in);
    buffer_free(&client->out);
    free(client);
}

/* Whether the connection still stands. */
static bool send_replies(struct client *client) {
    while (buffer_length(&client->out) > 0) {
        struct slice bytes = buffer_slice(&client->out);
        ssize_t sent = send(client->fd, bytes.data, bytes.length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && errno != EAGAIN)
            return false;
        if (sent < 0)
            break;
        buffer_drop(&client->out, (size_t)sent);
    }
    bool pending = buffer_length(&client->out) > 0;
    if (client->closing && !pending)
        return false;
    if (pending != client->writable_wanted) {
        struct epoll_event event = {.events = EPOLLIN | (pending ? EPOLLOUT : 0), .data.ptr = client};
        epoll_ctl(poller, EPOLL_CTL_MOD, client->fd, &event);
        client->writable_wanted = pending;
    }
    return true;
}

/* Answers whole requests that have come. */
static void answer(struct client *client) {
    static struct request request;
    while (!client->waiting && !client->closing && buffer_length(&client->in) > 0 &&
           buffer_length(&client->out) < UNREAD) {
        size_t length;
        const char *why;
        enum parsed parsed = request_parse(buffer_slice(&client->in), &request, &length, &why);
        if (parsed == PARSED_PART)
            return;
        if (parsed == PARSED_NONSENSE) {
            reply_error(&client->out, "ERR %s", why);
            client->closing = true;
            return;
        }
        if (request.count > 0)
            commands_run(client, request.count, request.words);
        buffer_drop(&client->in, length);
    }
}

static void serve(struct client *client) {
    /* Replies that make room in the buffer let waiting requests be answered. */
    for (;;) {
        size_t before = buffer_length(&client->in);
        answer(client);
        if (!send_replies(client)) {
            part(client);
            return;
        }
        if (buffer_length(&client->in) == before || buffer_length(&client->in) == 0)
            return;
    }
}

void server_answered(struct client *client) {
    client->waiting = false;
    serve(client);
}

static void hear(struct client *client) {
    ssize_t got = recv(client->fd, buffer_space(&client->in, READ_SIZE), READ_SIZE, 0);
    bool over = got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
    if (over || buffer_length(&client->in) > UNSERVED) {
        part(client);
        return;
    }
    if (got > 0)
        buffer_added(&client->in, (size_t)got);
    serve(client);
}

static void handle(const struct epoll_event *event) {
    void *what = event->data.ptr;
    if (what == &unix_listener) {
        greet(unix_listener);
    } else if (what == &tcp_listener) {
        greet(tcp_listener);
    } else if (what == &signals) {
        stopping = true;
    } else if (event->events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
        hear(what);
    } else {
        serve(what);
    }
}

void server_run(void) {
    struct epoll_event events[EVENTS];
    int64_t next_tick = 0, next_glance = 0;
    while (!stopping) {
        int timeout = orbits_busy() ? 1 : TICK_MICROSECONDS / 1000;
        int count = epoll_wait(poller, events, EVENTS, timeout);
        if (count < 0 && errno != EINTR)
            err(1, "epoll_wait");
        for (int i = 0; i < count; i++)
            handle(&events[i]);
        int64_t now = clock_microseconds();
        if (now >= next_glance) {
            orbits_glance();
            next_glance = now + GLANCE_MICROSECONDS;
        }
        if (now >= next_tick) {
            orbits_tick();
            next_tick = now + TICK_MICROSECONDS;
        }
    }
    if (settings.socket)
        unlink(settings.socket);
}
