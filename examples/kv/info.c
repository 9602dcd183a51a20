#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "commands.h"
#include "dump.h"
#include "protocol.h"
#include "server.h"
#include "settings.h"
#include "watchdog.h"

__attribute__((format(printf, 2, 3))) static void line(struct buffer *text, const char *format, ...) {
    char *space = buffer_space(text, 600);
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(space, 590, format, arguments);
    va_end(arguments);
    buffer_added(text, length < 590 ? (size_t)length : 589);
    buffer_add(text, "\r\n", 2);
}

static void server(struct buffer *text) {
    /* Some tools look for this line. */
    line(text, "redis_version:7.0.0");
    line(text, "redis_mode:standalone");
    line(text, "server_name:orrery-kv");
    line(text, "process_id:%d", getpid());
    line(text, "uptime_in_seconds:%" PRId64, server_uptime_seconds());
}

static void clients(struct buffer *text) { line(text, "connected_clients:%zu", server_client_count()); }

static void memory(struct buffer *text) {
    line(text, "used_memory:%zu", memory_in_use_everywhere());
    line(text, "used_memory_index:%zu", memory_in_use(MEMORY_INDEX));
    line(text, "used_memory_contents:%zu", memory_in_use(MEMORY_CONTENTS));
    line(text, "used_memory_deadlines:%zu", memory_in_use(MEMORY_DEADLINES));
    line(text, "maxmemory:%" PRId64, settings.max_memory);
    line(text, "maxmemory_policy:%s", settings.evict ? "allkeys-lru" : "noeviction");
}

static void persistence(struct buffer *text) {
    const struct dump_state *state = dump_state();
    line(text, "loading:0");
    line(text, "dump_by:%s", settings.dump_by_fork ? "fork" : "orbit");
    line(text, "rdb_bgsave_in_progress:%d", dump_is_running());
    line(text, "rdb_last_save_time:%" PRId64, state->last_save);
    line(text, "rdb_last_bgsave_status:%s", state->last_failed ? "err" : "ok");
    line(text, "dumps:%" PRIu64, state->dumps);
    line(text, "dump_last_trouble:%s", state->last_trouble);
    line(text, "dump_last_start_us:%" PRId64, state->start_us);
    line(text, "dump_last_took_us:%" PRId64, state->took_us);
}

static void stats(struct buffer *text) {
    line(text, "total_commands_processed:%" PRIu64, commands_done());
    line(text, "changes:%" PRIu64, store_changes());
    line(text, "expired_keys:%" PRIu64, store_expired());
    line(text, "evicted_keys:%" PRIu64, watchdog_census()->evicted);
}

static void orbits(struct buffer *text) {
    struct auxiliary *auxiliary;
    for (size_t i = 0; (auxiliary = orbits_at(i)); i++) {
        const struct companion *it = &auxiliary->companion;
        if (!it->entry)
            continue;
        bool up = it->orbit && orrery_orbit_alive(it->orbit) == 1;
        line(text,
             "orbit_%s:state=%s,pid=%d,under_way=%u,calls=%" PRIu64 ",failures=%" PRIu64 ",not_made=%" PRIu64
             ",refused=%" PRIu64 ",restarts=%ld,longest_us=%" PRIu64 ",last_trouble=%s",
             it->name, up ? "up" : "down", up ? orrery_orbit_pid(it->orbit) : 0, it->under_way, it->calls,
             it->failures, it->not_made, it->refused, companion_restarts(it), it->longest_us,
             it->last_trouble);
    }
}

static void watched(struct buffer *text) {
    const struct census *census = watchdog_census();
    line(text, "watchdog_rounds:%" PRIu64, census->rounds);
    line(text, "watchdog_warning:%s", census->warning);
    line(text, "watchdog_largest_bytes:%" PRIu64, census->largest);
    for (int type = 0; type < TYPES; type++)
        line(text, "watchdog_%s:keys=%" PRIu64 ",bytes=%" PRIu64, type_name((enum type)type),
             census->of[type].keys, census->of[type].bytes);
}

static void keyspace(struct buffer *text) {
    if (store_count() > 0)
        line(text, "db0:keys=%zu,expires=%zu", store_count(), store_deadlines()->count);
}

void command_info(struct client *client, size_t count, const struct slice *words) {
    static const struct {
        const char *name;
        void (*add)(struct buffer *text);
    } sections[] = {{"Server", server},           {"Clients", clients},  {"Memory", memory},
                    {"Persistence", persistence}, {"Stats", stats},      {"Orbits", orbits},
                    {"Watchdog", watched},        {"Keyspace", keyspace}};
    struct buffer text = {0};
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++) {
        bool wanted = count == 1;
        for (size_t word = 1; word < count; word++)
            wanted = wanted || slice_is(words[word], sections[i].name) || slice_is(words[word], "all") ||
                     slice_is(words[word], "everything") || slice_is(words[word], "default");
        if (!wanted)
            continue;
        if (buffer_length(&text) > 0)
            line(&text, "%s", "");
        line(&text, "# %s", sections[i].name);
        sections[i].add(&text);
    }
    reply_bulk(&client->out, buffer_slice(&text));
    buffer_free(&text);
}
