/*
 * An event loop in which each session has memory of its own: Algorithm 2 of "Light-Weight Contexts" (OSDI
 * 2016).
 *
 *     cc -Iinclude examples/lwc/algorithm2_sessions.c -Ltarget/release -lorrery -o algorithm2
 *     printf 'a red\nb green\na blue\n' | LD_LIBRARY_PATH=target/release ./algorithm2
 *
 * To keep it short, events are lines of standard input: the first character names the session, the rest is
 * what its client sent. A session remembers all its words in a global variable, which the others cannot see.
 */
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <orrery/context.h>
#include <orrery/rollback.h>

enum { UNFINISHED, FINISHED };

/* The session's state: each context has its own copy, empty as the root left it. */
static char words[256];

/* In a session's context: serves its events, one at each switch. */
static void serve(int root, char name) {
    for (;;) {
        char event[64] = "";
        size_t length = orrery_context_received(event, sizeof event - 1);
        int finished = length == 3 && memcmp(event, "end", 3) == 0;
        if (length > 0 && !finished)
            snprintf(words + strlen(words), sizeof words - strlen(words), " %s", event);
        printf("%c:%s%s\n", name, words, finished ? " (ended)" : "");
        fflush(stdout);
        if (orrery_context_switch(root, finished ? FINISHED : UNFINISHED, NULL) < 0)
            errx(1, "orrery_context_switch: %s", orrery_last_error());
    }
}

int main(void) {
    int sessions[256];
    char line[64];
    memset(sessions, -1, sizeof sessions);
    /* Of the descriptors a session gets the standard ones and the root's. */
    struct orrery_context_spec specs[] = {{ORRERY_CONTEXT_FD, ORRERY_CONTEXT_UNMAP, 3, ORRERY_CONTEXT_ALL}};
    setvbuf(stdin, NULL, _IONBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        unsigned char name = (unsigned char)line[0];
        line[strcspn(line, "\n")] = 0;
        const char *event = line[0] && line[1] ? line + 2 : "";
        if (sessions[name] < 0) {
            int caller;
            uint64_t args;
            int new = orrery_context_create(specs, 1, 0, &caller, &args);
            if (new < 0)
                errx(1, "orrery_context_create: %s", orrery_last_error());
            if (caller != -1)
                serve(new, (char)name);
            sessions[name] = new;
        }
        uint64_t done;
        int from = orrery_context_switch_bytes(sessions[name], 0, event, strlen(event), 1000, &done);
        if (from < 0)
            warnx("session %c: %s", name, orrery_last_error());
        if (from < 0 || done == FINISHED) {
            orrery_context_close(sessions[name]);
            sessions[name] = -1;
        }
    }
    return 0;
}
