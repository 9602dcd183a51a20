#include "notes.h"

#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROOM = 4096 };

static char *answer;

void notes_prepare(void) {
    answer = malloc(ROOM);
    if (!answer)
        err(1, "malloc");
}

static size_t keep(struct notes *notes, const char *line) {
    char **lines = realloc(notes->lines, (notes->count + 1) * sizeof *lines);
    char *copy = strdup(line);
    if (!lines || !copy)
        err(1, "malloc");
    notes->lines = lines;
    notes->lines[notes->count++] = copy;
    return (size_t)snprintf(answer, ROOM, "kept %zu\n", notes->count);
}

static size_t list(const struct notes *notes) {
    size_t length = 0;
    for (size_t i = 0; i < notes->count && length < ROOM - 2; i++)
        length += (size_t)snprintf(answer + length, ROOM - length, "%s%s", i ? ", " : "", notes->lines[i]);
    if (length > ROOM - 2)
        length = ROOM - 2;
    answer[length] = '\n';
    return length + 1;
}

/*
 * ECHO LENGTH TEXT: the text as the client sent it. THE BUG, on purpose: it believes the client how long that
 * is, as OpenSSL's heartbeat did in 2014 (CVE-2014-0160).
 */
static size_t echo(const char *arguments) {
    char *end;
    size_t claimed = strtoul(arguments, &end, 10);
    snprintf(answer, ROOM, "%s\n", *end ? end + 1 : end);
    return claimed + 1;
}

const char *notes_answer(struct notes *notes, char *line, size_t *length) {
    if (!strncmp(line, "KEEP ", 5))
        *length = keep(notes, line + 5);
    else if (!strcmp(line, "LIST"))
        *length = list(notes);
    else if (!strncmp(line, "ECHO ", 5))
        *length = echo(line + 5);
    else
        *length = (size_t)snprintf(answer, ROOM, "KEEP TEXT, LIST, or ECHO LENGTH TEXT\n");
    return answer;
}

void notes_forget(struct notes *notes) {
    /* What a client said is not wiped, as in most programs. */
    for (size_t i = 0; i < notes->count; i++)
        free(notes->lines[i]);
    free(notes->lines);
    *notes = (struct notes){0};
}
