#include "commands.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "dump.h"
#include "protocol.h"
#include "server.h"
#include "settings.h"
#include "slowlog.h"

void command_ping(struct client *client, size_t count, const struct slice *words) {
    if (count > 1)
        reply_bulk(&client->out, words[1]);
    else
        reply_status(&client->out, "PONG");
}

void command_echo(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    reply_bulk(&client->out, words[1]);
}

void command_select(struct client *client, size_t count, const struct slice *words) {
    (void)count;
    if (slice_is(words[1], "0"))
        reply_status(&client->out, "OK");
    else
        reply_error(&client->out, "ERR DB index is out of range");
}

void command_quit(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    reply_status(&client->out, "OK");
    client->closing = true;
}

static void reply_unknown(struct client *client, const char *command, struct slice word) {
    reply_error(&client->out, "ERR unknown %s subcommand or wrong number of arguments: '%.*s'", command,
                word.length < 64 ? (int)word.length : 64, word.data);
}

void command_client(struct client *client, size_t count, const struct slice *words) {
    if (slice_is(words[1], "setname") && count == 3) {
        size_t length = words[2].length < sizeof client->name ? words[2].length : sizeof client->name - 1;
        memcpy(client->name, words[2].data, length);
        client->name[length] = 0;
        reply_status(&client->out, "OK");
    } else if (slice_is(words[1], "getname") && count == 2) {
        reply_bulk(&client->out, slice_of(client->name));
    } else if (slice_is(words[1], "id") && count == 2) {
        reply_integer(&client->out, (int64_t)client->id);
    } else if (slice_is(words[1], "setinfo")) {
        reply_status(&client->out, "OK");
    } else if (slice_is(words[1], "list") && count == 2) {
        struct buffer list = {0};
        char line[160];
        for (struct client *other = server_clients(); other; other = other->next) {
            int length = snprintf(line, sizeof line, "id=%" PRIu64 " fd=%d name=%s\n", other->id, other->fd,
                                  other->name);
            buffer_add(&list, line, (size_t)length);
        }
        reply_bulk(&client->out, buffer_slice(&list));
        buffer_free(&list);
    } else {
        reply_unknown(client, "CLIENT", words[1]);
    }
}

/* redis-cli asks for help texts, and goes without. */
void command_command(struct client *client, size_t count, const struct slice *words) {
    if (count == 2 && slice_is(words[1], "count"))
        reply_integer(&client->out, (int64_t)commands_known());
    else
        reply_array(&client->out, 0);
}

static void config_get(struct client *client, size_t count, const struct slice *words) {
    struct buffer replies = {0};
    size_t found = 0;
    for (const struct setting *setting = setting_list; setting->name; setting++) {
        bool wanted = false;
        for (size_t i = 2; i < count; i++)
            wanted = wanted || slice_matches(slice_of(setting->name), words[i]);
        if (!wanted)
            continue;
        char number[24];
        if (setting->number)
            snprintf(number, sizeof number, "%" PRId64, *setting->number);
        reply_bulk(&replies, slice_of(setting->name));
        reply_bulk(&replies, slice_of(setting->number ? number : setting->shown()));
        found += 2;
    }
    reply_array(&client->out, found);
    struct slice bytes = buffer_slice(&replies);
    buffer_add(&client->out, bytes.data, bytes.length);
    buffer_free(&replies);
}

void command_config(struct client *client, size_t count, const struct slice *words) {
    if (slice_is(words[1], "get") && count >= 3) {
        config_get(client, count, words);
    } else if (slice_is(words[1], "set") && count == 4) {
        if (setting_change(words[2], words[3]))
            reply_status(&client->out, "OK");
        else
            reply_error(&client->out, "ERR there is no such setting to change, or no such value");
    } else if (slice_is(words[1], "resetstat") && count == 2) {
        reply_status(&client->out, "OK");
    } else {
        reply_unknown(client, "CONFIG", words[1]);
    }
}

void command_save(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    if (!dump_start(TROUBLE_NONE, client))
        reply_error(&client->out, "ERR no dump: %s", dump_state()->last_trouble);
}

void command_bgsave(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    if (dump_start(TROUBLE_NONE, NULL))
        reply_status(&client->out, "Background saving started");
    else
        reply_error(&client->out, "ERR no dump: %s", dump_state()->last_trouble);
}

void command_lastsave(struct client *client, size_t count, const struct slice *words) {
    (void)count, (void)words;
    reply_integer(&client->out, dump_state()->last_save);
}

void command_slowlog(struct client *client, size_t count, const struct slice *words) {
    int64_t wanted = 10;
    bool asked;
    if (slice_is(words[1], "get") && count <= 3) {
        if (count == 3 && !slice_to_integer(words[2], &wanted)) {
            reply_error(&client->out, NOT_INTEGER);
            return;
        }
        asked = slowlog_get(client, wanted < 0 ? INT64_MAX : wanted);
    } else if (slice_is(words[1], "len") && count == 2) {
        asked = slowlog_length(client);
    } else if (slice_is(words[1], "reset") && count == 2) {
        asked = slowlog_reset(client);
    } else {
        reply_unknown(client, "SLOWLOG", words[1]);
        return;
    }
    if (!asked)
        reply_error(&client->out, "ERR the slow log's orbit cannot be asked: %s",
                    slowlog.companion.last_trouble);
}

void command_shutdown(struct client *client, size_t count, const struct slice *words) {
    (void)words;
    if (count > 2 || (count == 2 && !slice_is(words[1], "nosave"))) {
        reply_error(&client->out, "ERR SAVE first, then SHUTDOWN [NOSAVE]");
        return;
    }
    server_stop();
}

/* DEBUG ORBIT name trouble: the orbit's next round goes wrong half way. */
static void debug_orbit(struct client *client, struct slice name, struct slice word) {
    enum trouble trouble;
    struct auxiliary *auxiliary;
    size_t i = 0;
    while ((auxiliary = orbits_at(i)) && !slice_is(name, auxiliary->companion.name))
        i++;
    if (!auxiliary)
        reply_error(&client->out, "ERR there are the orbits slowlog, dump, expiry and watchdog");
    else if (!trouble_named(word, &trouble))
        reply_error(&client->out, "ERR an orbit can crash, assert, exit, hang, spin, take memory, or lie");
    else if (!auxiliary->call(trouble))
        reply_error(&client->out, "ERR no call: %s", auxiliary->companion.last_trouble);
    else
        reply_status(&client->out, "OK");
}

static void reply_digest(struct client *client) {
    char text[20];
    snprintf(text, sizeof text, "%016" PRIx64, store_digest());
    reply_status(&client->out, text);
}

/* DEBUG DIGEST: of the data now. DEBUG DUMP: the same, and begins a dump that has to come to it. */
void command_debug(struct client *client, size_t count, const struct slice *words) {
    if (slice_is(words[1], "orbit") && count == 4) {
        debug_orbit(client, words[2], words[3]);
    } else if (slice_is(words[1], "digest") && count == 2) {
        reply_digest(client);
    } else if (slice_is(words[1], "dump") && count == 2) {
        if (dump_start(TROUBLE_NONE, NULL))
            reply_digest(client);
        else
            reply_error(&client->out, "ERR no dump: %s", dump_state()->last_trouble);
    } else {
        reply_unknown(client, "DEBUG", words[1]);
    }
}
