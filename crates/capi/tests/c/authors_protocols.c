/*
 * How the authors' ports use their library: Redis' slow log and RDB, nginx's WebDAV handler, MySQL's deadlock detector. Calls
 * name one pool; scratches and configurations are in others, made before the orbit, some at fixed addresses.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <orbit/orbit.h>

#include "check_authors.h"

#define MIB (1024 * 1024)

static struct orbit_pool *pool_at(unsigned long address) {
    struct orbit_pool *pool = orbit_pool_create_at(NULL, MIB, (void *)address);
    CHECK(pool && pool->rawptr == (void *)address);
    return pool;
}

static void ended(struct orbit_module *orbit) {
    int status;
    CHECK(orbit_destroy(orbit->gobid) == 0 && waitpid(orbit->gobid, &status, 0) == orbit->gobid);
    CHECK(orbit_gone(orbit));
    free(orbit);
}

/* ---- slow log: the orbit keeps the log; a query is answered by a list in one scratch ---- */

struct entry {
    long id;
    char text[24];
    struct entry *next;
};

struct slow_request {
    enum { PUSH, RESET, LENGTH, GET } what;
    const char *text;
};

struct slow_log {
    struct entry *newest;
    long length, last;
};

static void *slow_init(void) { return calloc(1, sizeof(struct slow_log)); }

static unsigned long slow_task(void *store, void *argbuf) {
    struct slow_log *log = store;
    struct slow_request *request = argbuf;
    struct orbit_scratch scratch;
    struct orbit_allocator *allocator;
    struct entry *entry, **head, **end;
    switch (request->what) {
    case PUSH:
        entry = calloc(1, sizeof *entry);
        entry->id = ++log->last;
        strncpy(entry->text, request->text, sizeof entry->text - 1);
        entry->next = log->newest;
        log->newest = entry;
        log->length++;
        return 0;
    case RESET:
        log->newest = NULL;
        log->length = 0;
        return 0;
    case LENGTH:
        return (unsigned long)log->length;
    default:
        CHECK(orbit_scratch_create(&scratch) == 0);
        allocator = orbit_scratch_open_any(&scratch, true);
        CHECK(allocator);
        end = head = orbit_alloc(allocator, sizeof *head);
        for (entry = log->newest; entry; entry = entry->next) {
            *end = orbit_alloc(allocator, sizeof **end);
            **end = *entry;
            end = &(*end)->next;
        }
        *end = NULL;
        CHECK(orbit_scratch_close_any(&scratch) == 1 && orbit_sendv(&scratch) == 0);
        return (unsigned long)head;
    }
}

static void slow_log(void) {
    struct orbit_pool *pool = pool_at(0x820000000), *scratches = pool_at(0x810000000);
    CHECK(orbit_scratch_set_pool(scratches) == 0);
    struct orbit_module *orbit = orbit_create("slowlog", slow_task, slow_init);
    CHECK(orbit);
    struct orbit_allocator *allocator = orbit_allocator_from_pool(pool, true);
    for (int round = 0; round < 3; round++) {
        for (int number = 1; number <= 40; number++) {
            char *text = orbit_alloc(allocator, 24);
            sprintf(text, "SET key%d %d", number, round);
            struct slow_request push = {PUSH, text};
            CHECK(orbit_call_async(orbit, ORBIT_NORETVAL, 1, &pool, NULL, &push, sizeof push, NULL) == 0);
            orbit_free(allocator, text);
        }
        struct slow_request get = {GET, NULL}, length = {LENGTH, NULL}, reset = {RESET, NULL};
        struct orbit_task task;
        union orbit_result result;
        CHECK(orbit_call(orbit, 1, &pool, NULL, &length, sizeof length) == 40);
        CHECK(orbit_call_async(orbit, 0, 1, &pool, NULL, &get, sizeof get, &task) == 0);
        CHECK(orbit_recvv(&result, &task) == 1);
        struct orbit_repr *answer = orbit_scratch_first(&result.scratch);
        CHECK(answer && answer->type == ORBIT_ANY);
        int number = 40;
        /* The list's pointers are those of the orbit: the scratch appears where it was sent from. */
        for (struct entry *entry = *(struct entry **)(((unsigned long)answer->any.data + 31) & ~15UL); entry;
             entry = entry->next, number--) {
            char text[24];
            sprintf(text, "SET key%d %d", number, round);
            CHECK(strcmp(entry->text, text) == 0 && entry->id == round * 40 + number);
        }
        CHECK(number == 0);
        CHECK(orbit_skip_one(&result.scratch, false) == ORBIT_ANY && orbit_scratch_empty(&result.scratch));
        CHECK(orbit_recvv(&result, &task) == 0 && result.retval != 0);
        CHECK(orbit_call(orbit, 1, &pool, NULL, &reset, sizeof reset) == 0);
    }
    ended(orbit);
}

/* ---- RDB: a file of all the data; a crash in mid-save, and a new orbit ---- */

struct save {
    long *numbers;
    long count;
    char path[64];
    bool crash;
};

static unsigned long save_task(void *store, void *argbuf) {
    struct save *save = argbuf;
    FILE *file = fopen(save->path, "w");
    (void)store;
    CHECK(file);
    for (long index = 0; index < save->count; index++) {
        if (save->crash && index == save->count / 2)
            abort();
        fprintf(file, "%ld\n", save->numbers[index]);
    }
    return fclose(file) == 0 ? 7 : 8;
}

static void rdb(void) {
    struct orbit_pool *pool = orbit_pool_create(NULL, MIB);
    struct orbit_allocator *allocator = orbit_allocator_from_pool(pool, true);
    struct save save = {orbit_alloc(allocator, 10000 * sizeof(long)), 10000, "/tmp/orrery-rdb-XXXXXX", true};
    int made = mkstemp(save.path), status;
    CHECK(made >= 0);
    struct orbit_module *orbit = orbit_create("rdb", save_task, NULL);
    for (int round = 0; round < 3; round++) {
        struct orbit_task task;
        union orbit_result result;
        save.crash = round == 0;
        for (long index = 0; index < save.count; index++)
            save.numbers[index] = index * (round + 1);
        CHECK(orbit && orbit_call_async(orbit, 0, 1, &pool, NULL, &save, sizeof save, &task) == 0);
        memset(save.numbers, 0, 10000 * sizeof(long)); /* too late for the save */
        errno = 0;
        int received = orbit_recvv(&result, &task);
        if (save.crash) {
            CHECK(received == -1 && errno == ESRCH && orbit_gone(orbit));
            CHECK(waitpid(orbit->gobid, &status, 0) == orbit->gobid && WTERMSIG(status) == SIGABRT);
            free(orbit);
            orbit = orbit_create("rdb", save_task, NULL);
            continue;
        }
        CHECK(received == 0 && result.retval == 7);
        FILE *file = fopen(save.path, "r");
        long number, count = 0;
        while (fscanf(file, "%ld", &number) == 1)
            CHECK(number == count++ * (round + 1));
        CHECK(count == save.count && fclose(file) == 0);
    }
    CHECK(unlink(save.path) == 0 && close(made) == 0);
    ended(orbit);
}

/* ---- a new orbit after each crash, as all ports do: what the dead ones had does not add up ---- */

static unsigned long crash_or_answer(void *store, void *argbuf) {
    (void)store;
    if (*(int *)argbuf)
        abort();
    return 5;
}

static int descriptors(void) {
    int count = 0, end = (int)sysconf(_SC_OPEN_MAX);
    for (int fd = 0; fd < end; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void crashes(void) {
    struct orbit_pool *pool = orbit_pool_create(NULL, MIB);
    struct rlimit limit, few = {256, 0};
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    few.rlim_max = limit.rlim_max;
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
    int before = descriptors();
    for (int round = 0; round < 400; round++) {
        struct orbit_module *orbit = orbit_create("again", crash_or_answer, NULL);
        CHECK(orbit);
        int answer = 0, crash = 1, status;
        struct orbit_task task;
        union orbit_result result;
        CHECK(orbit_call(orbit, 1, &pool, NULL, &answer, sizeof answer) == 5);
        CHECK(orbit_call_async(orbit, 0, 1, &pool, NULL, &crash, sizeof crash, &task) == 0);
        errno = 0;
        CHECK(orbit_recvv(&result, &task) == -1 && errno == ESRCH);
        CHECK(waitpid(orbit->gobid, &status, 0) == orbit->gobid);
        free(orbit);
    }
    CHECK(descriptors() < before + 40);
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/* ---- WebDAV: the configuration is in a pool that calls do not name; a pool for each request is emptied by hand ---- */

struct configuration {
    const char *root;
    long limit;
};

struct put {
    const char *name;
    size_t size;
};

static struct configuration *configuration;
static struct orbit_pool *raw;

static unsigned long put_task(void *store, void *argbuf) {
    struct put *put = argbuf;
    struct orbit_scratch scratch;
    char path[64];
    (void)store;
    /* As of the orbit's creation, whatever main made of it since. */
    CHECK(strcmp(configuration->root, "/srv/dav") == 0 && configuration->limit == 5000);
    CHECK(strcmp((const char *)raw->rawptr + 8192, "raw memory") == 0);
    snprintf(path, sizeof path, "%s/%s", configuration->root, put->name);
    CHECK(orbit_scratch_create(&scratch) == 0 && orbit_scratch_push_any(&scratch, path, strlen(path) + 1));
    CHECK(orbit_sendv(&scratch) == 0);
    return put->size <= (size_t)configuration->limit ? 201 : 413;
}

static void web_dav(bool use_meta) {
    struct orbit_pool *settings = pool_at(0x830000000 + use_meta * 0x10000000UL);
    struct orbit_pool *requests = orbit_pool_create(NULL, MIB), *scratches = orbit_pool_create(NULL, MIB);
    struct orbit_allocator *allocator = orbit_allocator_from_pool(settings, use_meta);
    configuration = orbit_alloc(allocator, sizeof *configuration);
    char *root = orbit_calloc(allocator, 16);
    strcpy(root, "/srv/dav");
    configuration->root = root;
    configuration->limit = 5000;
    raw = orbit_pool_create(NULL, MIB);
    strcpy((char *)raw->rawptr + 8192, "raw memory");
    CHECK(orbit_scratch_set_pool(scratches) == 0);
    struct orbit_module *orbit = orbit_create("dav", put_task, NULL);
    CHECK(orbit);
    configuration->limit = 1;
    for (int number = 0; number < 3000; number++) {
        requests->used = 0;
        allocator = orbit_allocator_from_pool(requests, use_meta);
        char *name = orbit_alloc(allocator, 1400), wanted[64];
        sprintf(name, "file%d", number);
        char *second = orbit_alloc(allocator, 200);
        CHECK(second != name && requests->used >= 1600 && requests->used < 8192);
        struct put put = {name, number % 2 ? 100 : 10000};
        if (number % 100 < 2) {
            struct orbit_task task;
            union orbit_result result;
            CHECK(orbit_call_async(orbit, 0, 1, &requests, NULL, &put, sizeof put, &task) == 0);
            CHECK(orbit_recvv(&result, &task) == 1);
            sprintf(wanted, "/srv/dav/file%d", number);
            struct orbit_repr *any = orbit_scratch_first(&result.scratch);
            CHECK(any->type == ORBIT_ANY && strcmp(any->any.data, wanted) == 0);
            CHECK(orbit_recvv(&result, &task) == 0 && result.retval == (number % 2 ? 201 : 413));
        }
        orbit_allocator_destroy(allocator);
    }
    ended(orbit);
}

/* ---- deadlock detector: called under a lock, it names a victim and has main cancel it ---- */

struct transaction {
    struct transaction *waits_for;
    unsigned long version;
    int cancel;
};

static struct transaction *woken;

static unsigned long wake(size_t argc, unsigned long argv[]) {
    woken = argc == 1 ? (struct transaction *)argv[0] : NULL;
    return 0;
}

static unsigned long detect(void *store, void *argbuf) {
    struct transaction *start = *(struct transaction **)argbuf, *victim = start;
    struct orbit_scratch scratch;
    (void)store;
    for (int depth = 0; victim->waits_for && depth < 200; depth++) {
        victim = victim->waits_for;
        if (victim == start) {
            unsigned long argv[] = {(unsigned long)start};
            CHECK(orbit_scratch_create(&scratch) == 0);
            start->cancel = 1; /* the orbit's copy, which is sent */
            CHECK(orbit_scratch_push_any(&scratch, &start->version, sizeof start->version));
            CHECK(orbit_scratch_push_update(&scratch, &start->cancel, sizeof start->cancel) == 2);
            CHECK(orbit_scratch_push_operation(&scratch, wake, 1, argv) == 3);
            CHECK(orbit_sendv(&scratch) == 0);
            return 1;
        }
    }
    return 0;
}

static void deadlocks(void) {
    struct orbit_pool *pool = orbit_pool_create(NULL, MIB), *scratches = orbit_pool_create(NULL, MIB);
    CHECK(orbit_scratch_set_pool(scratches) == 0);
    struct orbit_module *orbit = orbit_create("detector", detect, NULL);
    struct orbit_allocator *allocator = orbit_allocator_from_pool(pool, true);
    struct transaction *ring[100];
    CHECK(orbit);
    for (int index = 0; index < 100; index++)
        ring[index] = orbit_calloc(allocator, sizeof **ring);
    for (int index = 0; index < 99; index++)
        ring[index]->waits_for = ring[index + 1];
    CHECK(orbit_call(orbit, 1, &pool, NULL, &ring[0], sizeof ring[0]) == 0);
    ring[99]->waits_for = ring[0];
    for (unsigned long version = 1; version <= 20; version++) {
        struct transaction *start = ring[version];
        struct orbit_task task;
        union orbit_result result;
        start->version = version;
        CHECK(orbit_call_async(orbit, 0, 1, &pool, NULL, &start, sizeof start, &task) == 0);
        CHECK(orbit_recvv(&result, &task) == 1);
        /* Stops at the version, which main compares. */
        CHECK(orbit_apply(&result.scratch, true) == ORBIT_ANY && start->cancel == 0);
        CHECK(*(unsigned long *)orbit_scratch_first(&result.scratch)->any.data == start->version);
        CHECK(orbit_skip_one(&result.scratch, false) == ORBIT_ANY);
        CHECK(orbit_apply(&result.scratch, true) == ORBIT_END && start->cancel == 1 && woken == start);
        CHECK(orbit_recvv(&result, &task) == 0 && result.retval == 1);
    }
    ended(orbit);
}

int main(void) {
    slow_log();
    rdb();
    crashes();
    web_dav(false);
    web_dav(true);
    deadlocks();
    CHECK(orbit_destroy_all() == 0);
    return 0;
}
