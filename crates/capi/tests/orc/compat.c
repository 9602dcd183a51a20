/*
 * The paper's protocol (slide 2.5) under its names, with a store in the directory that is named first: a compartment registers an
 * object, and another one, which has the same bytes, requests it.
 */
#include <errno.h>
#include <orrery/compat/orc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../check_program.h"

static char object[50000];

/* Checks that the object has these bytes, and returns the inode of its file. */
static ino_t inode_of(struct orc_object *shared) {
    struct stat file;
    const char *bytes = (const char *)orc_map(shared, 0);
    CHECK(shared && bytes && orc_length(shared) == sizeof object);
    CHECK(memcmp(bytes, object, sizeof object) == 0);
    CHECK(fstat(orc_fd(shared, NULL), &file) == 0);
    return file.st_ino;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    memset(object, 'o', sizeof object);
    int there[2], done[2];
    CHECK(pipe(there) == 0 && pipe(done) == 0);
    pid_t first = fork();
    CHECK(first >= 0);
    if (first == 0) {
        CHECK(orc_connect(argv[1]) == 0);
        struct orc_object *mine = orc_register(object, sizeof object, ORC_OWN_PAGES);
        ino_t inode = inode_of(mine);
        CHECK(write(there[1], &inode, sizeof inode) == sizeof inode);
        /* It holds the object until the other one has it. */
        close(done[1]);
        CHECK(read(done[0], &inode, 1) == 0);
        CHECK(orc_release(mine) == 0);
        _exit(0);
    }
    CHECK(orc_connect(argv[1]) == 0);
    ino_t registered;
    CHECK(read(there[0], &registered, sizeof registered) == sizeof registered);
    struct orc_object_id hash;
    CHECK(orc_hash(object, sizeof object, &hash) == 0);
    struct orc_object *shared = orc_request(&hash);
    CHECK(inode_of(shared) == registered);
    CHECK(orc_release(shared) == 0);
    hash.bytes[0] ^= 1;
    FAILS(!orc_request(&hash), ENOENT);
    close(done[1]);
    int status;
    CHECK(waitpid(first, &status, 0) == first && status == 0);
    return 0;
}
