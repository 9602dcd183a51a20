#include "dump.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "clock.h"
#include "dump_file.h"
#include "protocol.h"
#include "server.h"
#include "settings.h"

/* How much nicer than main whoever writes the dump is. */
#define NICER 5

struct question {
    enum trouble trouble;
    const struct table *keys;
    const struct deadlines *deadlines;
    char temporary[900];
};

static struct dump_state state;
static bool running;
static pid_t child; /* that writes it, with --dump fork */
static int64_t begun;
static uint64_t waiting; /* the client to be answered, or 0 */
static char temporary[900];

const struct dump_state *dump_state(void) { return &state; }
bool dump_is_running(void) { return running; }

/* In the orbit, which has the settings that main had when it made the orbit. */
static long write_dump(void *argument, void *store) {
    (void)store;
    const struct question *question = argument;
    return dump_write(settings.file, question->temporary, question->keys, question->deadlines,
                      question->trouble);
}

static void create(void) {
    if (settings.dump_by_fork)
        return;
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.when_full = ORRERY_ORBIT_FULL_FAIL;
    options.time_limit_ms = (unsigned)settings.dump_limit;
    options.memory = (size_t)settings.orbit_memory;
    options.nice = NICER;
    companion_create(&dump.companion, write_dump, NULL, &options);
}

/* The dump is over: `keys` of them are in the file, or -errno, unless there was trouble. */
static void done(long keys, const char *trouble, uint64_t context) {
    (void)context;
    running = false;
    child = 0;
    state.took_us = clock_microseconds() - begun;
    state.last_failed = trouble || keys < 0;
    if (state.last_failed) {
        snprintf(state.last_trouble, sizeof state.last_trouble, "%s",
                 trouble ? trouble : strerror((int)-keys));
        fprintf(stderr, "dump: %s\n", state.last_trouble);
        unlink(temporary);
    } else {
        state.last_save = clock_milliseconds() / 1000;
        state.keys = keys;
        state.dumps++;
    }
    struct client *client = server_client(waiting);
    waiting = 0;
    if (!client)
        return;
    if (state.last_failed)
        reply_error(&client->out, "ERR the dump failed: %s", state.last_trouble);
    else
        reply_status(&client->out, "OK");
    server_answered(client);
}

static bool start_fork(void) {
    child = fork();
    if (child < 0) {
        snprintf(state.last_trouble, sizeof state.last_trouble, "fork: %s", strerror(errno));
        return false;
    }
    if (child == 0) {
        if (nice(NICER) < 0)
            perror("nice");
        int64_t keys = dump_write(settings.file, temporary, store_table(), store_deadlines(), TROUBLE_NONE);
        _exit(keys < 0 ? (int)-keys : 0);
    }
    return true;
}

static bool start_orbit(enum trouble trouble) {
    static const struct sight sight = {3, {MEMORY_INDEX, MEMORY_CONTENTS, MEMORY_DEADLINES}};
    struct question question = {trouble, store_table(), store_deadlines(), ""};
    strcpy(question.temporary, temporary);
    if (companion_call(&dump.companion, &sight, &question, sizeof question, (struct handler){.done = done}))
        return true;
    strcpy(state.last_trouble, dump.companion.last_trouble);
    return false;
}

bool dump_start(enum trouble trouble, struct client *client) {
    if (running) {
        snprintf(state.last_trouble, sizeof state.last_trouble, "a dump is being written already");
        return false;
    }
    snprintf(temporary, sizeof temporary, "%s.%d.tmp", settings.file, getpid());
    begun = clock_microseconds();
    state.keys = (int64_t)store_count();
    running = settings.dump_by_fork ? start_fork() : start_orbit(trouble);
    state.start_us = clock_microseconds() - begun;
    if (running && client) {
        client->waiting = true;
        waiting = client->id;
    }
    return running;
}

void dump_glance(void) {
    int status;
    if (child <= 0 || waitpid(child, &status, WNOHANG) != child)
        return;
    if (WIFSIGNALED(status))
        done(-1, strsignal(WTERMSIG(status)), 0);
    else
        done(WEXITSTATUS(status) ? -WEXITSTATUS(status) : (long)state.keys, NULL, 0);
}

void dump_abandon(void) {
    if (!running)
        return;
    if (child > 0) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    companion_destroy(&dump.companion);
    unlink(temporary);
}

static bool call(enum trouble trouble) { return !settings.dump_by_fork && dump_start(trouble, NULL); }

struct auxiliary dump = {.companion.name = "dump", .create = create, .call = call};
