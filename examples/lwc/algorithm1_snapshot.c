/*
 * A server that begins every request in the same state: Algorithm 1 of "Light-Weight Contexts" (OSDI 2016).
 *
 *     cc -Iinclude examples/lwc/algorithm1_snapshot.c -Ltarget/release -lorrery -o algorithm1
 *     printf 'one\ntwo\n' | LD_LIBRARY_PATH=target/release ./algorithm1
 *
 * Each line of standard input is a request. Whatever serving one leaves behind (memory, open files, the
 * working directory) is undone before the next.
 */
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <orrery/rollback.h>

/* The state of the server, which requests change. */
static int served;
static char *secret;

/* What outlives them. */
struct ledger {
    int requests;
};

/* Reads one line without buffering, which a resume would take back together with what was read ahead. */
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

/* A careless server: it leaks memory and files, wanders about, and remembers what it should not. */
static void serve(int number, const char *request) {
    served++;
    secret = strdup(request);
    for (char *c = secret; *c; c++)
        *c = (char)toupper((unsigned char)*c);
    if (open("/dev/null", O_RDONLY) < 0 || chdir("/") < 0)
        perror("serve");
    dprintf(1, "request %d: %s (%zu bytes, %d request%s served by this state)\n", number, secret,
            strlen(request), served, served == 1 ? "" : "s");
}

int main(void) {
    char request[1000];
    orrery_rollback_snapshot_t pristine;
    struct ledger *ledger = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (ledger == MAP_FAILED || orrery_rollback_exclude(ledger, 4096) < 0) {
        fprintf(stderr, "cannot make the ledger: %s\n", orrery_last_error());
        return 1;
    }

    int round = orrery_rollback_snapshot(&pristine);
    if (round < 0) {
        fprintf(stderr, "orrery_rollback_snapshot: %s\n", orrery_last_error());
        return 1;
    }
    if (!read_request(request, sizeof request)) {
        dprintf(1, "%d requests, the last one's secrets %s\n", ledger->requests, secret ? secret : "gone");
        return 0;
    }
    serve(++ledger->requests, request);
    orrery_rollback_resume(pristine, 1);
    fprintf(stderr, "orrery_rollback_resume: %s\n", orrery_last_error());
    return 1;
}
