/* Every function of orrery/orc.h, with a store in the folder that is named first. */
#include <errno.h>
#include <orrery/orc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            const char *text = orc_error();                                                                  \
            fprintf(stderr, "%s:%d: %s (errno %d: %s)\n", __FILE__, __LINE__, #condition, errno,             \
                    text ? text : "no error");                                                               \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

#define FAILS(call, number)                                                                                  \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        CHECK(!(call));                                                                                      \
        CHECK(errno == (number));                                                                            \
        CHECK(orc_error() && *orc_error());                                                                  \
    } while (0)

static char large[100000];

static void shares(void) {
    struct orc_id id, same;
    size_t offset = 1;
    struct stat one, two;
    memset(large, 'x', sizeof large);
    CHECK(orc_hash(large, sizeof large, &id) == 0);
    FAILS(orc_request(&id), ENOENT);
    struct orc_object *first = orc_register(large, sizeof large, 0);
    CHECK(first && orc_length(first) == sizeof large);
    CHECK(orc_identify(first, &same) == 0 && memcmp(&id, &same, sizeof id) == 0);
    struct orc_object *second = orc_request(&id);
    const char *bytes = (const char *)orc_map(second, 0);
    CHECK(bytes && memcmp(bytes, large, sizeof large) == 0);
    CHECK(orc_map(second, 0) == bytes);
    CHECK(fstat(orc_descriptor(first, &offset), &one) == 0 && offset == 0);
    CHECK(fstat(orc_descriptor(second, NULL), &two) == 0 && one.st_ino == two.st_ino);
    FAILS(orc_map(second, ORC_EXECUTABLE), EACCES);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, orc_descriptor(first, NULL), 0) == MAP_FAILED);
    CHECK(orc_release(first) == 0 && orc_release(second) == 0 && orc_release(NULL) == 0);

    struct orc_object *small = orc_register("small", 5, 0);
    CHECK(small && memcmp(orc_map(small, 0), "small", 5) == 0);
    CHECK(orc_release(small) == 0);

    int memory = memfd_create("bytes", MFD_CLOEXEC);
    CHECK(write(memory, "from a file", 11) == 11);
    struct orc_object *file = orc_register_file(memory, 11, ORC_ALONE);
    CHECK(file && memcmp(orc_map(file, 0), "from a file", 11) == 0);
    CHECK(orc_release(file) == 0 && close(memory) == 0);
}

static void publishes(void) {
    size_t size = 16 * 4096;
    char *mine = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mine != MAP_FAILED);
    memset(mine, 'p', size);
    FAILS(orc_publish(mine, size, 0), EINVAL);
    struct orc_object *published = orc_publish(mine, size, ORC_FREEZE);
    CHECK(published && orc_length(published) == size && mine[0] == 'p' && mine[size - 1] == 'p');
    CHECK(orc_release(published) == 0);
    CHECK(mine[5000] == 'p');
    FAILS(orc_publish(mine + 1, 4096, 0), EINVAL);
    FAILS(orc_publish(mine, size, ORC_PUBLIC), EINVAL);
    FAILS(orc_publish(mine, (size_t)-1, 0), EINVAL);
}

static void refuses(void) {
    FAILS(orc_register(NULL, 5, 0), EINVAL);
    FAILS(orc_register("", 0, 0), EFBIG);
    FAILS(orc_register("x", 1, 64), EINVAL);
    FAILS(orc_register("x", 1, ORC_EXECUTABLE), EACCES);
    FAILS(orc_register_file(-1, 5, 0), EBADF);
    FAILS(orc_register_file(0x7fffffff, 5, 0), EBADF);
    FAILS(orc_request(NULL), EINVAL);
    FAILS(orc_map(NULL, 0), EINVAL);
    CHECK(orc_length(NULL) == 0);
    FAILS(orc_identify(NULL, NULL) == 0, EINVAL);
    FAILS(orc_descriptor(NULL, NULL) >= 0, EINVAL);
    FAILS(orc_hash("x", 1, NULL) == 0, EINVAL);
    FAILS(orc_connect(NULL) == 0, EINVAL);
    FAILS(orc_connect("/nonexistent") == 0, ENOTCONN);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    setenv("ORRERY_ORC", "/nonexistent", 1);
    FAILS(orc_register("x", 1, 0), ENOTCONN);
    CHECK(orc_connect(argv[1]) == 0);
    shares();
    publishes();
    refuses();
    return 0;
}
