/*
 * Every way to an address: family as written, length, kind of socket, call. What a call did is asked of the kernel, which
 * knows best: the socket's own address, its peer, whether it listens, how much was sent.
 *
 * network PORT PATH NAME: the port at every address of this machine, a Unix socket's path, an abstract name. Prints a line
 * for each way that led somewhere ("PASSED call, domain, kind, address, length: own -> peer"), and how many there were.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct destination {
    const char *name;
    struct sockaddr_storage bytes;
    socklen_t length;
};

static struct destination destinations[64];
static size_t known;
static int tried, passed;

static void add(const char *name, const void *bytes, size_t size, size_t length) {
    struct destination *new = &destinations[known++];

    new->name = name;
    memset(&new->bytes, 0, sizeof(new->bytes));
    memcpy(&new->bytes, bytes, size);
    new->length = (socklen_t)length;
}

static void add_4(const char *name, sa_family_t family, const char *ip, int port, size_t length) {
    struct sockaddr_in address = {.sin_family = family, .sin_port = htons((uint16_t)port)};

    inet_pton(AF_INET, ip, &address.sin_addr);
    add(name, &address, sizeof(address), length);
}

static void add_6(const char *name, sa_family_t family, const char *ip, int port, size_t length) {
    struct sockaddr_in6 address = {.sin6_family = family, .sin6_port = htons((uint16_t)port)};

    inet_pton(AF_INET6, ip, &address.sin6_addr);
    add(name, &address, sizeof(address), length);
}

static void add_unix(const char *name, sa_family_t family, const char *path, size_t skip, size_t length) {
    struct sockaddr_un address = {.sun_family = family};

    strcpy(address.sun_path + skip, path);
    add(name, &address, sizeof(address), length);
}

static const char *shown(const struct sockaddr_storage *address, socklen_t length, char text[200]) {
    char ip[INET6_ADDRSTRLEN];

    if (address->ss_family == AF_INET) {
        const struct sockaddr_in *in = (const void *)address;

        snprintf(text, 200, "%s:%d", inet_ntop(AF_INET, &in->sin_addr, ip, sizeof(ip)), ntohs(in->sin_port));
    } else if (address->ss_family == AF_INET6) {
        const struct sockaddr_in6 *in = (const void *)address;

        snprintf(text, 200, "[%s]:%d", inet_ntop(AF_INET6, &in->sin6_addr, ip, sizeof(ip)),
                 ntohs(in->sin6_port));
    } else {
        const struct sockaddr_un *un = (const void *)address;
        size_t start = offsetof(struct sockaddr_un, sun_path);

        if (length <= start)
            snprintf(text, 200, "-");
        else if (un->sun_path[0] == 0)
            snprintf(text, 200, "@%.*s", (int)(length - start - 1), un->sun_path + 1);
        else
            snprintf(text, 200, "%s", un->sun_path);
    }
    return text;
}

static int has_name(const struct sockaddr_storage *address, socklen_t length) {
    if (address->ss_family == AF_INET)
        return ((const struct sockaddr_in *)address)->sin_port != 0;
    if (address->ss_family == AF_INET6)
        return ((const struct sockaddr_in6 *)address)->sin6_port != 0;
    return length > offsetof(struct sockaddr_un, sun_path);
}

struct kind {
    const char *name;
    int domain, type, protocol;
};

enum { CONNECT, FAST_CONNECT, BIND, LISTEN, SENDTO, FAST_SENDTO, SENDMSG, SENDMMSG, AUTOBIND, CALLS };
static const char *const calls[] = {"connect",     "fast connect", "bind",     "listen",  "sendto",
                                    "fast sendto", "sendmsg",      "sendmmsg", "autobind"};

static void attempt(const struct kind *kind, int call, const struct destination *to) {
    int one = 1, accepts = 0, s = socket(kind->domain, kind->type, kind->protocol);
    struct sockaddr_storage own = {0}, peer = {0}, other;
    socklen_t own_length = sizeof(own), peer_length = sizeof(peer), size = sizeof(accepts);
    const struct sockaddr *address = (const void *)&to->bytes;
    struct iovec part = {"x", 1};
    struct mmsghdr message = {.msg_hdr = {.msg_name = (void *)(uintptr_t)&to->bytes,
                                          .msg_namelen = to->length,
                                          .msg_iov = &part,
                                          .msg_iovlen = 1}};
    struct timeval soon = {2, 0};
    long sent = -1;
    int led = 0;
    char first[200], second[200];

    if (s < 0)
        return;
    tried++;
    setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &soon, sizeof(soon));
    switch (call) {
    case FAST_CONNECT:
        setsockopt(s, IPPROTO_TCP, 30 /* TCP_FASTOPEN_CONNECT */, &one, sizeof(one));
        if (connect(s, address, to->length) == 0)
            sent = send(s, "x", 1, MSG_NOSIGNAL);
        break;
    case CONNECT:
        connect(s, address, to->length);
        break;
    case BIND:
        /* The other port is in use. Both kinds of internet address have it at the same place. */
        other = to->bytes;
        if (kind->domain != AF_UNIX)
            ((struct sockaddr_in *)&other)->sin_port = 0;
        bind(s, (void *)&other, to->length);
        break;
    case LISTEN:
        listen(s, 1);
        break;
    case SENDTO:
        sent = sendto(s, "x", 1, MSG_NOSIGNAL, address, to->length);
        break;
    case FAST_SENDTO:
        sent = sendto(s, "x", 1, MSG_NOSIGNAL | MSG_FASTOPEN, address, to->length);
        break;
    case SENDMSG:
        sent = sendmsg(s, &message.msg_hdr, MSG_NOSIGNAL);
        break;
    case SENDMMSG:
        sent = sendmmsg(s, &message, 1, MSG_NOSIGNAL);
        break;
    case AUTOBIND:
        setsockopt(s, SOL_SOCKET, SO_PASSCRED, &one, sizeof(one));
        connect(s, address, to->length);
        break;
    default:
        break;
    }
    getsockname(s, (void *)&own, &own_length);
    if (getpeername(s, (void *)&peer, &peer_length) != 0)
        peer_length = 0;
    getsockopt(s, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size);
    led = peer_length > 0 || accepts || sent > 0;
    /* Datagrams that may be sent at all are sent from somewhere; a name that others can find is another matter. */
    if (call == BIND || kind->domain == AF_UNIX)
        led |= has_name(&own, own_length);
    if (led) {
        passed++;
        printf("PASSED %s, %s, %s, %d: %s -> %s%s\n", calls[call], kind->name, to->name, (int)to->length,
               shown(&own, own_length, first), peer_length ? shown(&peer, peer_length, second) : "-",
               accepts ? ", listens" : "");
    }
    if (led && kind->domain == AF_UNIX && call == BIND && first[0] != '@')
        unlink(first);
    close(s);
}

int main(int count, char **arguments) {
    static const struct kind kinds[] = {
        {"tcp4", AF_INET, SOCK_STREAM, 0},
        {"tcp6", AF_INET6, SOCK_STREAM, 0},
        {"mptcp4", AF_INET, SOCK_STREAM, 262},
        {"mptcp6", AF_INET6, SOCK_STREAM, 262},
        {"udp4", AF_INET, SOCK_DGRAM, 0},
        {"udp6", AF_INET6, SOCK_DGRAM, 0},
        {"udplite4", AF_INET, SOCK_DGRAM, 136},
        {"udplite6", AF_INET6, SOCK_DGRAM, 136},
        {"sctp4", AF_INET, SOCK_STREAM, 132},
        {"sctp4 by kind", AF_INET, SOCK_SEQPACKET, 0},
        {"sctp6", AF_INET6, SOCK_SEQPACKET, 132},
        {"dccp4", AF_INET, 6, 33},
        {"smc4", AF_INET, SOCK_STREAM, 256},
        {"raw4", AF_INET, SOCK_RAW, 17},
        {"unix stream", AF_UNIX, SOCK_STREAM, 0},
        {"unix datagram", AF_UNIX, SOCK_DGRAM, 0},
        {"unix packets", AF_UNIX, SOCK_SEQPACKET, 0},
        {"unix raw", AF_UNIX, SOCK_RAW, 0},
    };
    static const sa_family_t families[] = {AF_INET, AF_UNSPEC, AF_INET6, AF_UNIX};
    static const size_t lengths[] = {2, 8, 15, 16, 24, 28, 128};
    size_t start = offsetof(struct sockaddr_un, sun_path), path, name;
    int port;

    if (count != 4)
        return 2;
    port = atoi(arguments[1]);
    path = strlen(arguments[2]);
    name = strlen(arguments[3]);
    for (size_t i = 0; i < sizeof(lengths) / sizeof(*lengths); i++) {
        for (size_t family = 0; family < 2; family++) {
            add_4(family ? "unspec 127.0.0.1" : "127.0.0.1", families[family], "127.0.0.1", port, lengths[i]);
            add_4(family ? "unspec 0.0.0.0" : "0.0.0.0", families[family], "0.0.0.0", port, lengths[i]);
        }
    }
    for (size_t i = 4; i < sizeof(lengths) / sizeof(*lengths); i++) {
        add_6("::1", AF_INET6, "::1", port, lengths[i]);
        add_6("::", AF_INET6, "::", port, lengths[i]);
        add_6("::ffff:127.0.0.1", AF_INET6, "::ffff:127.0.0.1", port, lengths[i]);
        add_6("::ffff:0.0.0.0", AF_INET6, "::ffff:0.0.0.0", port, lengths[i]);
    }
    add_6("unspec ::1", AF_UNSPEC, "::1", port, sizeof(struct sockaddr_in6));
    add_unix("path", AF_UNIX, arguments[2], 0, start + path);
    add_unix("path with zero", AF_UNIX, arguments[2], 0, start + path + 1);
    add_unix("path, whole", AF_UNIX, arguments[2], 0, sizeof(struct sockaddr_un));
    add_unix("new path", AF_UNIX, "new", 0, sizeof(struct sockaddr_un));
    add_unix("abstract", AF_UNIX, arguments[3], 1, start + 1 + name);
    add_unix("new abstract", AF_UNIX, "orrery-new", 1, start + 11);
    add_unix("only the family", AF_UNIX, "", 0, start);
    add_unix("an empty name", AF_UNIX, "", 1, start + 1);
    for (size_t kind = 0; kind < sizeof(kinds) / sizeof(*kinds); kind++) {
        for (int call = 0; call < CALLS; call++) {
            int is_unix = kinds[kind].domain == AF_UNIX;

            for (size_t to = 0; to < known; to++) {
                /* What the kernel refuses for the family alone is tried once. */
                if (is_unix != (destinations[to].bytes.ss_family == AF_UNIX) && destinations[to].length != 16)
                    continue;
                if (call == LISTEN && to > 0)
                    continue;
                if (call == AUTOBIND && !is_unix)
                    continue;
                attempt(&kinds[kind], call, &destinations[to]);
            }
        }
    }
    printf("%d of %d ways led somewhere\n", passed, tried);
    return 0;
}
