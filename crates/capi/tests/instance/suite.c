/* Runs the main function of a library's tests in each of many instances, which all exist: suite LIBRARY COUNT [ARGUMENT...]. */

#include <errno.h>
#include <orrery/instance.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int main_function(int argc, char **argv);

static int fail(const char *operation) {
    fprintf(stderr, "cannot %s: %s\n", operation, strerror(errno));
    return 2;
}

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: suite LIBRARY COUNT [ARGUMENT...]\n");
        return 2;
    }
    struct orrery_instance_library *library = orrery_instance_load(argv[1], NULL);
    if (library == NULL)
        return fail("load the library");
    main_function *suite = (main_function *)orrery_instance_symbol(library, "suite_main");
    if (suite == NULL)
        return fail("find suite_main");
    const size_t count = strtoul(argv[2], NULL, 10);
    struct orrery_instance **instances = calloc(count, sizeof *instances);
    size_t failed = 0;
    if (instances == NULL)
        return fail("allocate a list");
    for (size_t at = 0; at < count; at++)
        if ((instances[at] = orrery_instance_create(library)) == NULL)
            return fail("create an instance");
    for (size_t at = 0; at < count; at++) {
        if (orrery_instance_enter(instances[at]) != 0)
            return fail("enter an instance");
        const int result = suite(argc - 2, argv + 2);
        if (orrery_instance_leave(instances[at]) != 0)
            return fail("leave an instance");
        if (result != 0) {
            fprintf(stderr, "instance %zu: status %d\n", at, result);
            failed++;
        }
    }
    for (size_t at = 0; at < count; at++)
        if (orrery_instance_destroy(instances[at]) != 0)
            return fail("destroy an instance");
    fprintf(stderr, "%zu instances, %zu failed\n", count, failed);
    return failed != 0;
}
