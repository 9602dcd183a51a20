/* The event loop. */
#ifndef KV_SERVER_H
#define KV_SERVER_H

#include "client.h"

/* Opens the sockets. Ends the program where that fails. */
void server_listen(void);

/* Serves until server_stop. */
void server_run(void);
void server_stop(void);

/* The client with this number, unless it has gone. */
struct client *server_client(uint64_t id);
struct client *server_clients(void);
size_t server_client_count(void);

/* An orbit's answer to a waiting client is in its buffer: go on with it. */
void server_answered(struct client *client);

int64_t server_uptime_seconds(void);

#endif
