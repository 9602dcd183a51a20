/*
 * What attackers have in common: a directory to work in, a file that they must not get, and how they tell what they got.
 *
 * Each includes this once, and ends with a table of attacks, by name.
 */
#ifndef ATTACKER_H
#define ATTACKER_H

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const char *work, *secret;

static void broken(const char *how) {
    printf("BROKEN: %s\n", how);
    fflush(stdout);
    _exit(1);
}

/* The secret must not be what was opened. */
static void examine(int fd, const char *how) {
    char text[64];
    ssize_t count;

    if (fd < 0)
        return;
    count = pread(fd, text, sizeof(text) - 1, 0);
    if (count > 0) {
        text[count] = 0;
        if (strstr(text, "SECRET"))
            broken(how);
    }
    close(fd);
}

struct attack {
    const char *name;
    void (*run)(void);
};

/* Runs the one that was asked for: PROGRAM ATTACK FOLDER SECRET. Prints "held" where it got nothing. */
static int attack(const struct attack *attacks, size_t known, int count, char **arguments) {
    if (count < 4)
        return 2;
    work = arguments[2];
    secret = arguments[3];
    for (size_t i = 0; i < known; i++) {
        if (strcmp(arguments[1], attacks[i].name) == 0) {
            attacks[i].run();
            puts("held");
            return 0;
        }
    }
    broken("there is no such attack");
    return 2;
}

#endif
