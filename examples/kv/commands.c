#include "commands.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "clock.h"
#include "protocol.h"
#include "settings.h"
#include "slowlog.h"

struct known {
    const char *name;
    command run;
    int words;  /* how many there are, or at least if negative */
    bool grows; /* needs memory */
};

/* Sorted by name. */
static const struct known known[] = {
    {"append", command_append, 3, true},      {"bgsave", command_bgsave, -1, false},
    {"client", command_client, -2, false},    {"command", command_command, -1, false},
    {"config", command_config, -2, false},    {"dbsize", command_dbsize, 1, false},
    {"debug", command_debug, -2, false},      {"decr", command_decr, 2, true},
    {"decrby", command_decrby, 3, true},      {"del", command_del, -2, false},
    {"echo", command_echo, 2, false},         {"exists", command_exists, -2, false},
    {"expire", command_expire, 3, true},      {"flushall", command_flushall, -1, false},
    {"flushdb", command_flushall, -1, false}, {"get", command_get, 2, false},
    {"hdel", command_hdel, -3, false},        {"hget", command_hget, 3, false},
    {"hgetall", command_hgetall, 2, false},   {"hlen", command_hlen, 2, false},
    {"hset", command_hset, -4, true},         {"incr", command_incr, 2, true},
    {"incrby", command_incrby, 3, true},      {"info", command_info, -1, false},
    {"keys", command_keys, 2, false},         {"lastsave", command_lastsave, 1, false},
    {"llen", command_llen, 2, false},         {"lpop", command_lpop, -2, false},
    {"lpush", command_lpush, -3, true},       {"lrange", command_lrange, 4, false},
    {"mget", command_mget, -2, false},        {"mset", command_mset, -3, true},
    {"persist", command_persist, 2, false},   {"pexpire", command_pexpire, 3, true},
    {"ping", command_ping, -1, false},        {"pttl", command_pttl, 2, false},
    {"quit", command_quit, -1, false},        {"rpop", command_rpop, -2, false},
    {"rpush", command_rpush, -3, true},       {"save", command_save, 1, false},
    {"scan", command_scan, -2, false},        {"select", command_select, 2, false},
    {"set", command_set, -3, true},           {"shutdown", command_shutdown, -1, false},
    {"slowlog", command_slowlog, -2, false},  {"strlen", command_strlen, 2, false},
    {"ttl", command_ttl, 2, false},           {"type", command_type, 2, false},
    {"unlink", command_del, -2, false},
};

#define KNOWN (sizeof known / sizeof *known)

static uint64_t done;

size_t commands_known(void) { return KNOWN; }
uint64_t commands_done(void) { return done; }

static int compare(const void *name, const void *element) {
    return strcasecmp(name, ((const struct known *)element)->name);
}

static const struct known *find(struct slice word) {
    char name[16];
    if (word.length >= sizeof name || memchr(word.data, 0, word.length))
        return NULL;
    memcpy(name, word.data, word.length);
    name[word.length] = 0;
    return bsearch(name, known, KNOWN, sizeof *known, compare);
}

/* Whether there is memory for it; says so if not. */
static bool has_room(struct client *client, size_t count, const struct slice *words) {
    size_t size = 0;
    for (size_t i = 0; i < count; i++)
        size += words[i].length;
    uint64_t most = (uint64_t)settings.max_memory;
    if (most > 0 && !settings.evict && memory_in_use_everywhere() + size > most) {
        reply_error(&client->out, "OOM command not allowed when used memory > 'maxmemory'.");
        return false;
    }
    if (!memory_has_room(size)) {
        reply_error(&client->out, "OOM the areas are full: start the server with a larger --capacity");
        return false;
    }
    return true;
}

void commands_run(struct client *client, size_t count, const struct slice *words) {
    const struct known *command = find(words[0]);
    int shown = words[0].length < 64 ? (int)words[0].length : 64;
    if (!command) {
        reply_error(&client->out, "ERR unknown command '%.*s'", shown, words[0].data);
        return;
    }
    size_t least = (size_t)abs(command->words);
    if (count < least || (command->words > 0 && count > least)) {
        reply_error(&client->out, "ERR wrong number of arguments for '%s' command", command->name);
        return;
    }
    if (command->grows && !has_room(client, count, words))
        return;
    int64_t begin = clock_microseconds();
    command->run(client, count, words);
    int64_t took = clock_microseconds() - begin;
    done++;
    if (settings.slowlog_slower_than >= 0 && took >= settings.slowlog_slower_than &&
        command->run != command_slowlog)
        slowlog_note(client, count, words, took);
}

struct entry *commands_find(struct client *client, struct slice key, enum type type, bool *wrong) {
    struct entry *entry = store_find(key);
    *wrong = entry && entry->type != type;
    if (!*wrong)
        return entry;
    reply_error(&client->out, WRONG_TYPE);
    return NULL;
}
