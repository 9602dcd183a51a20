/* Every function of orrery/instance.h, with the library that is named first and one without the pass. */
#include <errno.h>
#include <orrery/instance.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../check_program.h"

typedef int (*next_function)(void);
typedef char *(*grow_function)(size_t);
static next_function next;
static grow_function grow;

static int next_in(struct orrery_instance *instance) {
    CHECK(orrery_instance_enter(instance) == 0);
    int number = next();
    CHECK(orrery_instance_leave(instance) == 0);
    return number;
}

static void *attached(void *instance) {
    FAILS(orrery_instance_leave((struct orrery_instance *)instance) == -1, EPERM);
    FAILS(orrery_instance_detach((struct orrery_instance *)instance) == -1, EPERM);
    CHECK(orrery_instance_attach((struct orrery_instance *)instance) == 0);
    FAILS(orrery_instance_attach((struct orrery_instance *)instance) == -1, EBUSY);
    FAILS(orrery_instance_destroy((struct orrery_instance *)instance) == -1, EBUSY);
    CHECK(next() == 4);
    CHECK(orrery_instance_detach((struct orrery_instance *)instance) == 0);
    CHECK(next() == 1);
    return NULL;
}

static void *enters(void *instance) {
    FAILS(orrery_instance_enter((struct orrery_instance *)instance) == -1, EBUSY);
    return NULL;
}

static void in_thread(void *(*function)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, function, argument) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

static jmp_buf before;

static void jumps_past_leave(struct orrery_instance *instance) {
    if (!setjmp(before)) {
        CHECK(orrery_instance_enter(instance) == 0);
        longjmp(before, 1);
    }
}

/* A thread that passed by a leave is in the instance, which every call that needs it unused reports. */
static void was_not_left(struct orrery_instance *instance) {
    FAILS(orrery_instance_enter(instance) == -1, EBUSY);
    FAILS(orrery_instance_reset(instance) == -1, EBUSY);
    FAILS(orrery_instance_destroy(instance) == -1, EBUSY);
    int number = next();
    CHECK(orrery_instance_leave(instance) == 0);
    FAILS(orrery_instance_leave(instance) == -1, EPERM);
    CHECK(next_in(instance) == number + 1);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    struct orrery_instance_options options = ORRERY_INSTANCE_OPTIONS_INIT;
    FAILS(!orrery_instance_load("/nowhere", NULL), ENOENT);
    FAILS(!orrery_instance_load(argv[2], NULL), ENOEXEC);
    FAILS(!orrery_instance_load(NULL, NULL), EINVAL);
    options.state = 9;
    FAILS(!orrery_instance_load(argv[1], &options), EINVAL);
    options.state = ORRERY_INSTANCE_STATE_COPIED;
    options.size = 0;
    FAILS(!orrery_instance_load(argv[1], &options), EINVAL);
    options.size = sizeof options;
    options.heap_limit = 1 << 20;
    struct orrery_instance_library *library = orrery_instance_load(argv[1], &options);
    CHECK(library && orrery_instance_state_size(library) >= 4 && orrery_instance_state_size(NULL) == 0);
    struct orrery_instance_library *again = orrery_instance_load(argv[1], NULL);
    CHECK(again && orrery_instance_symbol(again, "next") == orrery_instance_symbol(library, "next"));
    orrery_instance_close(again);
    void *address = orrery_instance_symbol(library, "next");
    memcpy(&next, &address, sizeof next);
    address = orrery_instance_symbol(library, "grow");
    memcpy(&grow, &address, sizeof grow);
    FAILS(!orrery_instance_symbol(library, "absent"), ENOENT);
    FAILS(!orrery_instance_symbol(NULL, "next"), EINVAL);
    FAILS(!orrery_instance_symbol(library, NULL), EINVAL);

    struct orrery_instance *one = orrery_instance_create(library), *two = orrery_instance_create(library);
    CHECK(one && two);
    CHECK(next_in(one) == 1 && next_in(one) == 2 && next_in(two) == 1);
    int *counter = (int *)orrery_instance_variable(one, "counter");
    CHECK(counter && *counter == 3);
    CHECK(orrery_instance_enter(one) == 0);
    FAILS(orrery_instance_enter(one) == -1, EBUSY);
    in_thread(enters, one);
    CHECK(orrery_instance_enter(two) == 0);
    FAILS(orrery_instance_leave(one) == -1, EPERM);
    CHECK(next() == 2);
    CHECK(orrery_instance_leave(two) == 0);
    CHECK(next() == 3);
    FAILS(orrery_instance_destroy(one) == -1, EBUSY);
    FAILS(orrery_instance_reset(one) == -1, EBUSY);
    FAILS(!orrery_instance_snapshot_take(one), EBUSY);
    CHECK(orrery_instance_leave(one) == 0);
    FAILS(orrery_instance_leave(one) == -1, EPERM);
    in_thread(attached, one);

    CHECK(orrery_instance_enter(one) == 0);
    char *block = grow(100000);
    CHECK(block);
    memset(block, 'x', 100000);
    CHECK(!grow(2 << 20));
    CHECK(orrery_instance_leave(one) == 0);
    CHECK(grow(10));

    struct orrery_instance_snapshot *snapshot = orrery_instance_snapshot_take(one);
    CHECK(snapshot);
    CHECK(next_in(one) == 5 && next_in(one) == 6);
    struct orrery_instance *copy = orrery_instance_create_from(snapshot);
    CHECK(copy && next_in(copy) == 5);
    int *copied = (int *)orrery_instance_copy_of(copy, counter);
    CHECK(copied == (int *)orrery_instance_variable(copy, "counter"));
    char *copied_block = (char *)orrery_instance_copy_of(copy, block);
    CHECK(copied_block && copied_block != block && copied_block[99999] == 'x');
    FAILS(!orrery_instance_copy_of(copy, &copy), ENOENT);
    FAILS(!orrery_instance_copy_of(two, block), ENOENT);
    FAILS(!orrery_instance_copy_of(NULL, block), EINVAL);
    CHECK(orrery_instance_restore(one, snapshot) == 0 && next_in(one) == 5);
    FAILS(orrery_instance_restore(two, snapshot) == -1, EINVAL);
    FAILS(orrery_instance_restore(one, NULL) == -1, EINVAL);
    CHECK(orrery_instance_reset(one) == 0 && next_in(one) == 1);
    orrery_instance_snapshot_destroy(snapshot);
    orrery_instance_snapshot_destroy(NULL);

    jumps_past_leave(two);
    was_not_left(two);
#ifdef __cplusplus
    try {
        CHECK(orrery_instance_enter(two) == 0);
        throw 1;
    } catch (int) {
        was_not_left(two);
    }
#endif

    orrery_instance_close(library);
    orrery_instance_close(NULL);
    CHECK(orrery_instance_destroy(copy) == 0 && orrery_instance_destroy(two) == 0);
    CHECK(next_in(one) == 2);
    CHECK(orrery_instance_destroy(one) == 0 && orrery_instance_destroy(NULL) == 0);
    return 0;
}
