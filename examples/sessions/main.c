/*
 * A server that keeps notes for its clients, with a bug that lets each of them read memory it should not.
 *
 *     sessions [--plain] [--port PORT] [--ready N] [--most N]
 *
 * It prints the port that it listens on.
 */
#include "notes.h"
#include "server.h"

#include <arpa/inet.h>
#include <err.h>
#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

static int listen_on(unsigned port) {
    struct sockaddr_in address = {
        .sin_family = AF_INET,
        .sin_port = htons((uint16_t)port),
        .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
    };
    socklen_t length = sizeof address;
    int yes = 1;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener < 0 || setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) < 0 ||
        bind(listener, (struct sockaddr *)&address, length) < 0 || listen(listener, 512) < 0 ||
        getsockname(listener, (struct sockaddr *)&address, &length) < 0)
        err(1, "listening on port %u", port);
    printf("%u\n", ntohs(address.sin_port));
    fflush(stdout);
    return listener;
}

static unsigned number(const char *text) {
    char *end;
    unsigned long value = strtoul(text, &end, 10);
    if (end == text || *end || value > 65535)
        errx(2, "%s is no number up to 65535", text);
    return (unsigned)value;
}

int main(int count, char **arguments) {
    static const struct option options[] = {
        {"plain", no_argument, NULL, 'p'},
        {"port", required_argument, NULL, 'o'},
        {"ready", required_argument, NULL, 'r'},
        {"most", required_argument, NULL, 'm'},
        {NULL, 0, NULL, 0},
    };
    unsigned plain = 0, port = 0, ready = 8, most = 256;
    for (int option; (option = getopt_long(count, arguments, "", options, NULL)) != -1;)
        switch (option) {
        case 'p':
            plain = 1;
            break;
        case 'o':
            port = number(optarg);
            break;
        case 'r':
            ready = number(optarg);
            break;
        case 'm':
            most = number(optarg);
            break;
        default:
            return 2;
        }
    signal(SIGPIPE, SIG_IGN);
    int listener = listen_on(port);
    notes_prepare();
    if (plain)
        serve_plainly(listener);
    else
        serve_in_sessions(listener, ready, most);
}
