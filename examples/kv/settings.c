#include "settings.h"

#include <err.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct settings settings = {
    .port = -1,
    .file = "dump.okv",
    .capacity = (int64_t)8 << 30,
    .dump_limit = 600 * 1000,
    .task_limit = 1000,
    .orbit_memory = (int64_t)64 << 20,
    .active_expiry = 1,
    .watchdog_interval = 1000,
    .slowlog_slower_than = 10000,
    .slowlog_length = 128,
};

static const char help[] =
    "usage: kv (--socket PATH | --port NUMBER) [OPTIONS]\n"
    "A key-value server for redis-cli and redis-benchmark, whose auxiliary tasks are orbits.\n"
    "\n"
    "  --socket PATH          listen on a Unix socket\n"
    "  --port NUMBER          listen on a port of 127.0.0.1; 0 for any that is free\n"
    "  --file PATH            where dumps go, and what is loaded at the start (dump.okv)\n"
    "  --dump orbit|fork      how a dump sees the data as they were when it began (orbit)\n"
    "  --dump-limit MS        how long a dump may take (600000)\n"
    "  --task-limit MS        how long any other task may take (1000)\n"
    "  --orbit-memory BYTES   what an orbit may need for itself (67108864)\n"
    "  --capacity BYTES       up to which each area can grow (8589934592)\n"
    "  --set NAME=VALUE       as CONFIG SET does\n";

static int64_t number(const char *option, const char *text, int64_t least) {
    int64_t value;
    if (!slice_to_integer(slice_of(text), &value) || value < least)
        errx(2, "--%s: %s is no number from %lld upwards", option, text, (long long)least);
    return value;
}

static void set(const char *text) {
    const char *equals = strchr(text, '=');
    struct slice name = {text, equals ? (size_t)(equals - text) : 0};
    if (!equals || !setting_change(name, slice_of(equals + 1)))
        errx(2, "--set %s: not a setting and its value, such as maxmemory=1000000", text);
}

void settings_from_command_line(int argc, char **argv) {
    static const struct option options[] = {
        {"socket", required_argument, NULL, 's'},
        {"port", required_argument, NULL, 'p'},
        {"file", required_argument, NULL, 'f'},
        {"dump", required_argument, NULL, 'd'},
        {"dump-limit", required_argument, NULL, 'l'},
        {"task-limit", required_argument, NULL, 't'},
        {"orbit-memory", required_argument, NULL, 'm'},
        {"capacity", required_argument, NULL, 'c'},
        {"set", required_argument, NULL, 'S'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", options, &index)) != -1) {
        const char *name = options[index].name;
        switch (option) {
        case 's':
            settings.socket = optarg;
            break;
        case 'p':
            settings.port = (int)number(name, optarg, 0);
            if (settings.port > 65535)
                errx(2, "--port: there is no port %s", optarg);
            break;
        case 'f':
            settings.file = optarg;
            break;
        case 'd':
            settings.dump_by_fork = strcmp(optarg, "fork") == 0;
            if (!settings.dump_by_fork && strcmp(optarg, "orbit") != 0)
                errx(2, "--dump: orbit or fork, not %s", optarg);
            break;
        case 'l':
            settings.dump_limit = number(name, optarg, 1);
            break;
        case 't':
            settings.task_limit = number(name, optarg, 1);
            break;
        case 'm':
            settings.orbit_memory = number(name, optarg, 1 << 20);
            break;
        case 'c':
            settings.capacity = number(name, optarg, (int64_t)128 << 20);
            break;
        case 'S':
            set(optarg);
            break;
        case 'h':
            fputs(help, stdout);
            exit(0);
        default:
            fputs(help, stderr);
            exit(2);
        }
    }
    if (optind < argc)
        errx(2, "what is %s? See --help", argv[optind]);
    if (!settings.socket && settings.port < 0)
        errx(2, "nothing to listen on: say --socket PATH or --port NUMBER");
    if (strlen(settings.file) > 800)
        errx(2, "--file: more than 800 characters");
}

static const char *policy(void) { return settings.evict ? "allkeys-lru" : "noeviction"; }
static const char *file(void) { return settings.file; }
static const char *dump_by(void) { return settings.dump_by_fork ? "fork" : "orbit"; }
static const char *nothing(void) { return ""; }
static const char *no(void) { return "no"; }

const struct setting setting_list[] = {
    {"slowlog-log-slower-than", &settings.slowlog_slower_than, NULL},
    {"slowlog-max-len", &settings.slowlog_length, NULL},
    {"maxmemory", &settings.max_memory, NULL},
    {"watchdog-interval", &settings.watchdog_interval, NULL},
    {"active-expiry", &settings.active_expiry, NULL},
    {"maxmemory-policy", NULL, policy},
    {"dbfilename", NULL, file},
    {"dump", NULL, dump_by},
    {"save", NULL, nothing},
    {"appendonly", NULL, no},
    {NULL, NULL, NULL},
};

bool setting_change(struct slice name, struct slice value) {
    if (slice_is(name, "maxmemory-policy")) {
        if (!slice_is(value, "allkeys-lru") && !slice_is(value, "noeviction"))
            return false;
        settings.evict = slice_is(value, "allkeys-lru");
        return true;
    }
    int64_t wanted;
    for (const struct setting *setting = setting_list; setting->name; setting++) {
        if (setting->number && slice_is(name, setting->name) && slice_to_integer(value, &wanted)) {
            bool negative_means_none = setting->number == &settings.slowlog_slower_than;
            if (wanted < 0 && !negative_means_none)
                return false;
            *setting->number = wanted;
            return true;
        }
    }
    return false;
}
