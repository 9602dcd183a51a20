/* The commands, by name. */
#ifndef KV_COMMANDS_H
#define KV_COMMANDS_H

#include "client.h"
#include "slice.h"
#include "store.h"

/* words[0] is the command's name. */
typedef void (*command)(struct client *client, size_t count, const struct slice *words);

/* Runs one, and notes it if it was slow. */
void commands_run(struct client *client, size_t count, const struct slice *words);

size_t commands_known(void);
uint64_t commands_done(void);

/* What several commands need. */

#define WRONG_TYPE "WRONGTYPE Operation against a key holding the wrong kind of value"
#define NOT_INTEGER "ERR value is not an integer or out of range"
#define SYNTAX "ERR syntax error"

/*
 * The entry of a key if it has this type. Stores whether the type is another one, and says so to the client.
 */
struct entry *commands_find(struct client *client, struct slice key, enum type type, bool *wrong);

/* strings.c */
void command_get(struct client *client, size_t count, const struct slice *words);
void command_set(struct client *client, size_t count, const struct slice *words);
void command_append(struct client *client, size_t count, const struct slice *words);
void command_strlen(struct client *client, size_t count, const struct slice *words);
void command_incr(struct client *client, size_t count, const struct slice *words);
void command_decr(struct client *client, size_t count, const struct slice *words);
void command_incrby(struct client *client, size_t count, const struct slice *words);
void command_decrby(struct client *client, size_t count, const struct slice *words);
void command_mget(struct client *client, size_t count, const struct slice *words);
void command_mset(struct client *client, size_t count, const struct slice *words);

/* lists.c */
void command_lpush(struct client *client, size_t count, const struct slice *words);
void command_rpush(struct client *client, size_t count, const struct slice *words);
void command_lpop(struct client *client, size_t count, const struct slice *words);
void command_rpop(struct client *client, size_t count, const struct slice *words);
void command_llen(struct client *client, size_t count, const struct slice *words);
void command_lrange(struct client *client, size_t count, const struct slice *words);

/* hashes.c */
void command_hset(struct client *client, size_t count, const struct slice *words);
void command_hget(struct client *client, size_t count, const struct slice *words);
void command_hdel(struct client *client, size_t count, const struct slice *words);
void command_hgetall(struct client *client, size_t count, const struct slice *words);
void command_hlen(struct client *client, size_t count, const struct slice *words);

/* keys.c */
void command_del(struct client *client, size_t count, const struct slice *words);
void command_exists(struct client *client, size_t count, const struct slice *words);
void command_type(struct client *client, size_t count, const struct slice *words);
void command_expire(struct client *client, size_t count, const struct slice *words);
void command_pexpire(struct client *client, size_t count, const struct slice *words);
void command_ttl(struct client *client, size_t count, const struct slice *words);
void command_pttl(struct client *client, size_t count, const struct slice *words);
void command_persist(struct client *client, size_t count, const struct slice *words);
void command_keys(struct client *client, size_t count, const struct slice *words);
void command_scan(struct client *client, size_t count, const struct slice *words);
void command_dbsize(struct client *client, size_t count, const struct slice *words);
void command_flushall(struct client *client, size_t count, const struct slice *words);

/* administration.c */
void command_ping(struct client *client, size_t count, const struct slice *words);
void command_echo(struct client *client, size_t count, const struct slice *words);
void command_select(struct client *client, size_t count, const struct slice *words);
void command_quit(struct client *client, size_t count, const struct slice *words);
void command_client(struct client *client, size_t count, const struct slice *words);
void command_command(struct client *client, size_t count, const struct slice *words);
void command_config(struct client *client, size_t count, const struct slice *words);
void command_save(struct client *client, size_t count, const struct slice *words);
void command_bgsave(struct client *client, size_t count, const struct slice *words);
void command_lastsave(struct client *client, size_t count, const struct slice *words);
void command_slowlog(struct client *client, size_t count, const struct slice *words);
void command_shutdown(struct client *client, size_t count, const struct slice *words);
void command_debug(struct client *client, size_t count, const struct slice *words);

/* info.c */
void command_info(struct client *client, size_t count, const struct slice *words);

#endif
