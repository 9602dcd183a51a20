/* What the command line and CONFIG SET say. */
#ifndef KV_SETTINGS_H
#define KV_SETTINGS_H

#include "slice.h"

struct settings {
    const char *socket;    /* a Unix socket to listen on, or NULL */
    int port;              /* a port of 127.0.0.1 to listen on, 0 for any, or -1 */
    const char *file;      /* where the dump is */
    bool dump_by_fork;     /* fork for a dump instead of calling an orbit */
    int64_t capacity;      /* bytes up to which each area can grow */
    int64_t dump_limit;    /* milliseconds that a dump may take */
    int64_t task_limit;    /* milliseconds that any other task may take */
    int64_t orbit_memory;  /* bytes that an orbit may need for itself */
    int64_t active_expiry; /* whether keys are deleted at their deadlines, and not when they are asked for */
    int64_t watchdog_interval;   /* milliseconds between two rounds of the watchdog; 0 for none */
    int64_t slowlog_slower_than; /* microseconds from which a command is slow; negative for none */
    int64_t slowlog_length;      /* how many slow commands are kept */
    int64_t max_memory;          /* bytes; 0 for no limit */
    bool evict; /* delete the keys that were not used for longest, rather than refuse commands */
};

extern struct settings settings;

/* Ends the program where the command line makes no sense, or only asks for help. */
void settings_from_command_line(int argc, char **argv);

struct setting {
    const char *name;
    int64_t *number; /* NULL for those that are only shown */
    const char *(*shown)(void);
};

/* All that CONFIG knows; the last one has no name. */
extern const struct setting setting_list[];

bool setting_change(struct slice name, struct slice value);

#endif
