/* Every function of orrery/object.h, with a store in the directory that is named first. */
#include <errno.h>
#include <orrery/object.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../check_program.h"

static char large[100000];

static void shares(void) {
    struct orrery_object_id id, same;
    size_t offset = 1;
    struct stat one, two;
    memset(large, 'x', sizeof large);
    CHECK(orrery_object_hash(large, sizeof large, &id) == 0);
    FAILS(!orrery_object_request(&id), ENOENT);
    struct orrery_object *first = orrery_object_register(large, sizeof large, 0);
    CHECK(first && orrery_object_length(first) == sizeof large);
    CHECK(orrery_object_identify(first, &same) == 0 && memcmp(&id, &same, sizeof id) == 0);
    struct orrery_object *second = orrery_object_request(&id);
    const char *bytes = (const char *)orrery_object_map(second, 0);
    CHECK(bytes && memcmp(bytes, large, sizeof large) == 0);
    CHECK(orrery_object_map(second, 0) == bytes);
    CHECK(fstat(orrery_object_fd(first, &offset), &one) == 0 && offset == 0);
    CHECK(fstat(orrery_object_fd(second, NULL), &two) == 0 && one.st_ino == two.st_ino);
    FAILS(!orrery_object_map(second, ORRERY_OBJECT_EXECUTABLE), EACCES);
    CHECK(mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, orrery_object_fd(first, NULL), 0) ==
          MAP_FAILED);
    CHECK(orrery_object_release(first) == 0 && orrery_object_release(second) == 0 &&
          orrery_object_release(NULL) == 0);

    struct orrery_object *small = orrery_object_register("small", 5, 0);
    CHECK(small && memcmp(orrery_object_map(small, 0), "small", 5) == 0);
    CHECK(orrery_object_release(small) == 0);

    int memory = memfd_create("bytes", MFD_CLOEXEC);
    CHECK(write(memory, "from a file", 11) == 11);
    struct orrery_object *file = orrery_object_register_file(memory, 11, ORRERY_OBJECT_OWN_PAGES);
    CHECK(file && memcmp(orrery_object_map(file, 0), "from a file", 11) == 0);
    CHECK(orrery_object_release(file) == 0 && close(memory) == 0);
}

static void publishes(void) {
    size_t size = 16 * 4096;
    char *mine = (char *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mine != MAP_FAILED);
    memset(mine, 'p', size);
    FAILS(!orrery_object_publish(mine, size, 0), EINVAL);
    struct orrery_object *published = orrery_object_publish(mine, size, ORRERY_OBJECT_FREEZE);
    CHECK(published && orrery_object_length(published) == size && mine[0] == 'p' && mine[size - 1] == 'p');
    CHECK(orrery_object_release(published) == 0);
    CHECK(mine[5000] == 'p');
    FAILS(!orrery_object_publish(mine + 1, 4096, 0), EINVAL);
    FAILS(!orrery_object_publish(mine, size, ORRERY_OBJECT_PUBLIC), EINVAL);
    FAILS(!orrery_object_publish(mine, (size_t)-1, 0), EINVAL);
}

static void refuses(void) {
    FAILS(!orrery_object_register(NULL, 5, 0), EINVAL);
    FAILS(!orrery_object_register("", 0, 0), EFBIG);
    FAILS(!orrery_object_register("x", 1, 64), EINVAL);
    FAILS(!orrery_object_register("x", 1, ORRERY_OBJECT_EXECUTABLE), EACCES);
    FAILS(!orrery_object_register_file(-1, 5, 0), EBADF);
    FAILS(!orrery_object_register_file(0x7fffffff, 5, 0), EBADF);
    FAILS(!orrery_object_request(NULL), EINVAL);
    FAILS(!orrery_object_map(NULL, 0), EINVAL);
    CHECK(orrery_object_length(NULL) == 0);
    FAILS(orrery_object_identify(NULL, NULL) != 0, EINVAL);
    FAILS(orrery_object_fd(NULL, NULL) < 0, EINVAL);
    FAILS(orrery_object_hash("x", 1, NULL) != 0, EINVAL);
    FAILS(orrery_object_connect(NULL) != 0, EINVAL);
    FAILS(orrery_object_connect("/nonexistent") != 0, ENOTCONN);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    setenv("ORRERY_ORC", "/nonexistent", 1);
    FAILS(!orrery_object_register("x", 1, 0), ENOTCONN);
    CHECK(orrery_object_connect(argv[1]) == 0);
    shares();
    publishes();
    refuses();
    return 0;
}
