/* The slow log: kept by an orbit in its own memory, which main has to ask for it. */
#ifndef KV_SLOWLOG_H
#define KV_SLOWLOG_H

#include "client.h"
#include "orbits.h"

extern struct auxiliary slowlog;

/* Notes a command that took so long. */
void slowlog_note(const struct client *client, size_t count, const struct slice *words, int64_t microseconds);

/* These answer the client later; false if the orbit cannot be asked. */
bool slowlog_get(struct client *client, int64_t count);
bool slowlog_length(struct client *client);
bool slowlog_reset(struct client *client);

#endif
