/* Programs written for the orbit authors' library run as they are: pools, calls, updates, ends. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <orbit/orbit.h>

#include "check_authors.h"

struct wish {
    int *number;
    int by;
};

static int calls = 40;
static struct orbit_pool *scratches;
static unsigned long called_with;

static void *make_store(void) {
    int *count = malloc(sizeof *count);
    *count = calls;
    return count;
}

static unsigned long add(void *store, void *argbuf) {
    struct wish *wish = argbuf;
    CHECK(is_orbit_context());
    *wish->number += wish->by; /* the orbit's own copy */
    return (unsigned long)(*wish->number + 1000 * ++*(int *)store);
}

static unsigned long send_two(void *store, void *argbuf) {
    struct wish *wish = argbuf;
    char place[sizeof(struct orbit_update) + sizeof(int)];
    struct orbit_update *update = (struct orbit_update *)place;
    (void)store;
    for (int round = 1; round <= 2; round++) {
        int value = *wish->number + round;
        update->ptr = wish->number;
        update->length = sizeof value;
        memcpy(update->data, &value, sizeof value);
        CHECK(orbit_send(update) == 0);
    }
    return 77;
}

static unsigned long note(size_t argc, unsigned long argv[]) {
    called_with = argc == 2 ? argv[0] + argv[1] : 0;
    return 5;
}

static unsigned long send_scratch(void *store, void *argbuf) {
    struct wish *wish = argbuf;
    struct orbit_scratch scratch;
    unsigned long arguments[] = {30, 12};
    (void)store;
    CHECK(orbit_scratch_set_pool(scratches) == 0 && orbit_scratch_create(&scratch) == 0);
    *wish->number = 5;
    CHECK(orbit_scratch_push_update(&scratch, wish->number, sizeof(int)) == 1);
    CHECK(orbit_scratch_push_any(&scratch, "hello", 6));
    CHECK(orbit_scratch_push_operation(&scratch, note, 2, arguments) == 3);
    CHECK(orbit_sendv(&scratch) == 0);
    return 78;
}

static unsigned long crash(void *store, void *argbuf) {
    (void)store;
    send_two(store, argbuf);
    abort();
}

int main(void) {
    struct orbit_pool *pool = orbit_pool_create(NULL, 4096 * 4);
    scratches = orbit_pool_create(NULL, 4096 * 4);
    CHECK(pool && scratches && pool->length == 4096 * 4);
    struct orbit_module *orbit = orbit_create("test", add, make_store);
    CHECK(orbit && orbit->gobid > 0 && orbit->mpid == getpid() && strcmp(orbit->name, "test") == 0);
    CHECK(!is_orbit_context() && orbit_exists(orbit) && !orbit_gone(orbit));
    struct orbit_allocator *allocator = orbit_allocator_from_pool(pool, true);
    CHECK(allocator);
    int *number = orbit_alloc(allocator, sizeof *number);
    CHECK(number && *number == 0 && orbit_allocated_by((char *)number, (struct orbit_allocator *)allocator));
    *number = 3;
    struct wish wish = {number, 4};

    CHECK(orbit_call(orbit, 1, &pool, NULL, &wish, sizeof wish) == 41007);
    CHECK(*number == 3);
    CHECK(orbit_call(orbit, 1, &pool, add, &wish, sizeof wish) == 42007);
    char large[1024] = "";
    errno = 0;
    CHECK(orbit_call(orbit, 1, &pool, NULL, large, sizeof large) == -1 && errno == EINVAL);
    errno = 0;
    CHECK(orbit_commit() == (unsigned long)-1 && errno == ENOSYS);

    struct orbit_task task;
    union orbit_result result;
    char place[sizeof(struct orbit_update) + ORBIT_BUFFER_MAX];
    struct orbit_update *update = (struct orbit_update *)place;
    CHECK(orbit_call_async(orbit, 0, 1, &pool, send_two, &wish, sizeof wish, &task) == 0);
    *number = 100;
    CHECK(task.orbit == orbit && task.taskid != 0);
    for (int round = 1; round <= 2; round++) {
        CHECK(orbit_recv(&task, update) == 0);
        CHECK(update->ptr == number && update->length == sizeof(int));
        CHECK(memcmp(update->data, &(int){3 + round}, sizeof(int)) == 0);
    }

    CHECK(orbit_call_async(orbit, 0, 1, &pool, send_scratch, &wish, sizeof wish, &task) == 0);
    CHECK(orbit_recvv(&result, &task) == 1);
    struct orbit_scratch scratch = result.scratch;
    CHECK(scratch.count == 3 && orbit_scratch_first(&scratch)->type == ORBIT_UPDATE);
    CHECK(orbit_apply_one(&scratch, false) == ORBIT_UPDATE && *number == 5 && scratch.count == 2);
    struct orbit_repr *any = orbit_scratch_first(&scratch);
    CHECK(any->type == ORBIT_ANY && any->any.length >= 6 && strcmp(any->any.data, "hello") == 0);
    CHECK(orbit_skip_one(&scratch, false) == ORBIT_ANY);
    CHECK(orbit_apply(&scratch, false) == ORBIT_END && called_with == 42 && orbit_scratch_empty(&scratch));
    CHECK(orbit_recvv(&result, &task) == 0 && result.retval == 78);

    /* What was sent before a crash arrives; then the orbit is a dead child of ours. */
    int status, pid = orbit->gobid;
    CHECK(orbit_call_async(orbit, 0, 1, &pool, crash, &wish, sizeof wish, &task) == 0);
    CHECK(orbit_recv(&task, update) == 0 && orbit_recv(&task, update) == 0);
    errno = 0;
    CHECK(orbit_recvv(&result, &task) == -1 && errno == ESRCH);
    CHECK(waitpid(-1, &status, 0) == pid && WIFSIGNALED(status));
    CHECK(orbit_gone(orbit));
    errno = 0;
    CHECK(orbit_call(orbit, 0, NULL, NULL, NULL, 0) == -1 && errno == EINVAL);

    struct orbit_module *other = orbit_create("other", add, make_store);
    CHECK(other && orbit_call(other, 1, &pool, NULL, &wish, sizeof wish) == 41009);
    CHECK(orbit_destroy(other->gobid) == 0 && orbit_gone(other));
    CHECK(waitpid(other->gobid, &status, 0) == other->gobid);
    orbit_free(allocator, number);
    orbit_allocator_destroy(allocator);
    CHECK(orbit_destroy_all() == 0);
    return 0;
}
