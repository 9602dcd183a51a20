/*
 * A key-value server that redis-cli and redis-benchmark can talk to. Its slow log, its dumps, the expiry of
 * keys and its memory watchdog are orbits: they crash, hang and starve without it.
 */
#include <err.h>
#include <stdio.h>

#include "dump.h"
#include "dump_file.h"
#include "memory.h"
#include "orbits.h"
#include "server.h"
#include "settings.h"
#include "store.h"

int main(int argc, char **argv) {
    settings_from_command_line(argc, argv);
    memory_init((size_t)settings.capacity);
    store_init();
    /* Before there are connections, which orbits would inherit. */
    orbits_create();
    int64_t keys = dump_load(settings.file);
    if (keys >= 0)
        printf("loaded %lld keys from %s\n", (long long)keys, settings.file);
    server_listen();
    server_run();
    dump_abandon();
    orbits_destroy();
    return 0;
}
