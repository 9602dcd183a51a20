/* Who is connected. */
#ifndef KV_CLIENT_H
#define KV_CLIENT_H

#include "buffer.h"

struct client {
    struct client *next;
    uint64_t id;
    int fd;
    struct buffer in;
    struct buffer out;
    char name[64];
    bool waiting; /* for an orbit's answer; its further requests wait, too */
    bool closing; /* once all is sent */
    bool writable_wanted;
};

#endif
