/* A library whose main function runs in each of many instances, which all exist. */

#ifndef ALL_INSTANCES_H
#define ALL_INSTANCES_H

#include <errno.h>
#include <orrery/instance.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int main_function(int argc, char **argv);

struct all_instances {
    main_function *function;
    struct orrery_instance **instances;
    size_t count;
};

/* Ends the process: its status is that of no test. */
__attribute__((noreturn)) static void fail(const char *operation) {
    fprintf(stderr, "cannot %s: %s\n", operation, strerror(errno));
    fflush(NULL);
    _Exit(120);
}

static struct all_instances create_all(const char *path, const char *function, const char *count) {
    struct orrery_instance_library *library = orrery_instance_load(path, NULL);
    if (library == NULL)
        fail("load the library");
    struct all_instances all = {.count = strtoul(count, NULL, 10)};
    all.function = (main_function *)orrery_instance_symbol(library, function);
    if (all.function == NULL)
        fail("find its main function");
    all.instances = calloc(all.count, sizeof *all.instances);
    if (all.instances == NULL)
        fail("allocate a list");
    for (size_t at = 0; at < all.count; at++)
        if ((all.instances[at] = orrery_instance_create(library)) == NULL)
            fail("create an instance");
    return all;
}

static void enter(struct all_instances all, size_t at) {
    if (orrery_instance_enter(all.instances[at]) != 0)
        fail("enter an instance");
}

static void leave(struct all_instances all, size_t at) {
    if (orrery_instance_leave(all.instances[at]) != 0)
        fail("leave an instance");
}

/* An instance that is destroyed already stays so. */
static void destroy(struct all_instances all, size_t at) {
    if (all.instances[at] != NULL && orrery_instance_destroy(all.instances[at]) != 0)
        fail("destroy an instance");
    all.instances[at] = NULL;
}

static void destroy_all(struct all_instances all) {
    for (size_t at = 0; at < all.count; at++)
        destroy(all, at);
    free(all.instances);
}

#endif
