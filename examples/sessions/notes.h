/* What the server does for a client: it keeps notes, and echoes. One line in, one answer out. */
#ifndef NOTES_H
#define NOTES_H

#include <stddef.h>

/* A client's notes. */
struct notes {
    char **lines;
    size_t count;
};

/* Answers a line: where the answer begins, and how many bytes it has. */
const char *notes_answer(struct notes *notes, char *line, size_t *length);

void notes_forget(struct notes *notes);

/* The buffer that answers are made in is there from the beginning. */
void notes_prepare(void);

#endif
