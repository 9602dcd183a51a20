/*
 * A server that begins every request in the same state: Algorithm 1 of "Light-Weight Contexts" (OSDI 2016),
 * with contexts, as the paper has it. (algorithm1_snapshot.c does the same with snapshots, and faster.)
 *
 *     cc -Iinclude examples/lwc/algorithm1_contexts.c -Ltarget/release -lorrery -o algorithm1
 *     printf 'one\ntwo\n' | LD_LIBRARY_PATH=target/release ./algorithm1
 *
 * Each line of standard input is a request.
 */
#include <ctype.h>
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <orrery/context.h>
#include <orrery/rollback.h>

static int served;

/* Returns a context that is as the calling one is now; returns again in it when rollback switches there. */
static int snapshot(void) {
    for (;;) {
        int caller;
        uint64_t args;
        int new = orrery_context_create(NULL, 0, 0, &caller, &args);
        if (new < 0)
            errx(1, "orrery_context_create: %s", orrery_last_error());
        if (caller == -1)
            return new;
        orrery_context_close(caller); /* the state that served the last request */
    }
}

static void rollback(int snap) {
    orrery_context_switch(snap, 0, NULL);
    errx(1, "orrery_context_switch: %s", orrery_last_error());
}

/* Reads one line without buffering: what is read ahead would be gone with this state. */
static int read_request(char *line, size_t size) {
    size_t length = 0;
    while (length + 1 < size && read(0, line + length, 1) == 1) {
        if (line[length] == '\n') {
            line[length] = 0;
            return 1;
        }
        length++;
    }
    line[length] = 0;
    return length > 0;
}

int main(void) {
    int snap = snapshot();
    char line[128];
    if (!read_request(line, sizeof line)) {
        puts("end");
        return 0; /* in whichever context: it ends the program */
    }
    served++;
    for (char *c = line; *c; c++)
        *c = (char)toupper((unsigned char)*c);
    printf("%s, served by a state that served %d request%s\n", line, served, served == 1 ? "" : "s");
    fflush(stdout); /* the buffer is memory of this state */
    rollback(snap);
}
