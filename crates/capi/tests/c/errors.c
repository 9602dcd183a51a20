/* Every error has its number and a text, and changes nothing. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "check.h"

static orrery_rollback_snapshot_t id;
static volatile int *shared;

static void *elsewhere(void *unused) {
    orrery_rollback_snapshot_t other = 77;
    CHECK_ERROR(orrery_rollback_snapshot(&other), EPERM);
    CHECK(other == 77);
    CHECK_ERROR(orrery_rollback_resume(id, 1), EPERM);
    CHECK_ERROR(orrery_rollback_discard(id), EPERM);
    CHECK_ERROR(orrery_rollback_exclude((void *)(uintptr_t)shared, 4096), EPERM);
    return unused;
}

static void *waits(void *barrier) {
    pthread_barrier_wait((pthread_barrier_t *)barrier);
    pthread_barrier_wait((pthread_barrier_t *)barrier);
    return NULL;
}

static void in_child(void) {
    CHECK_ERROR(orrery_rollback_resume(id, 1), ECHILD);
    CHECK_ERROR(orrery_rollback_discard(id), ECHILD);
    /* A child may take its own, and its parent's names still mean nothing. */
    orrery_rollback_snapshot_t own;
    volatile int here = 1;
    int got = orrery_rollback_snapshot(&own);
    CHECK(got >= 0 && here == 1);
    here = 2;
    if (got == 0)
        orrery_rollback_resume(own, 5);
    CHECK(got == 5 && own != id);
    CHECK_ERROR(orrery_rollback_resume(id, 1), ENOENT);
    _exit(0);
}

int main(void) {
    const size_t page = 4096;
    char on_stack[3 * 4096];
    char *stack_page = (char *)(((uintptr_t)on_stack + page - 1) & ~(uintptr_t)(page - 1));
    pthread_t thread;
    pthread_barrier_t barrier;

    /* Before there is any. */
    CHECK(!orrery_last_error());
    CHECK_ERROR(orrery_rollback_resume(1, 1), ENOENT);
    CHECK_ERROR(orrery_rollback_discard(1), ENOENT);
    CHECK_ERROR(orrery_rollback_snapshot(NULL), EINVAL);
    static const char *tracker;
    static char *saved;
    tracker = getenv("ORRERY_TRACKER");
    saved = tracker ? strdup(tracker) : NULL;
    setenv("ORRERY_TRACKER", "nonsense", 1);
    id = 3;
    CHECK_ERROR(orrery_rollback_snapshot(&id), EINVAL);
    CHECK(id == 3 && strstr(orrery_last_error(), "ORRERY_TRACKER"));
    if (saved)
        setenv("ORRERY_TRACKER", saved, 1);
    else
        unsetenv("ORRERY_TRACKER");

    /* Other threads. */
    shared = (volatile int *)mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    CHECK(pthread_barrier_init(&barrier, NULL, 2) == 0);
    CHECK(pthread_create(&thread, NULL, waits, &barrier) == 0);
    pthread_barrier_wait(&barrier);
    CHECK_ERROR(orrery_rollback_snapshot(&id), EAGAIN);
    CHECK(id == 3);
    pthread_barrier_wait(&barrier);
    CHECK(pthread_join(thread, NULL) == 0);

    int got = orrery_rollback_snapshot(&id);
    CHECK(got >= 0 && !orrery_last_error());
    if (got == 0) {
        CHECK_ERROR(orrery_rollback_resume(id, 0), EINVAL);
        CHECK_ERROR(orrery_rollback_resume(id, -1), EINVAL);
        CHECK_ERROR(orrery_rollback_resume(0, 1), ENOENT);
        CHECK_ERROR(orrery_rollback_resume(id + 1, 1), ENOENT);
        CHECK_ERROR(orrery_rollback_resume(id | 1u << 31, 1), ENOENT);
        CHECK_ERROR(orrery_rollback_resume(~(orrery_rollback_snapshot_t)0, 1), ENOENT);
        CHECK_ERROR(orrery_rollback_discard(0), ENOENT);
        CHECK_ERROR(orrery_rollback_snapshot(NULL), EINVAL);

        char *memory =
            (char *)mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED && munmap(memory + 2 * page, page) == 0);
        CHECK_ERROR(orrery_rollback_exclude(memory + 1, page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(memory, page - 1), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(memory, 0), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(memory, 4 * page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(NULL, page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(stack_page, page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude(memory, (size_t)0 - page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude((void *)((uintptr_t)0 - page), 2 * page), EINVAL);
        CHECK_ERROR(orrery_rollback_exclude((void *)((uintptr_t)0 - page), page), EINVAL);
        CHECK(strlen(orrery_last_error()) > 10);

        CHECK(pthread_create(&thread, NULL, elsewhere, NULL) == 0);
        CHECK(pthread_join(thread, NULL) == 0);

        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0)
            in_child();
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);

        *shared = 1;
        orrery_rollback_resume(id, 4);
        CHECK(0);
    }
    /* All of that did it no harm; and orrery_last_error has nothing to say about a resume that undid everything. */
    CHECK(got == 4 && *shared == 1 && !orrery_last_error());

    /* A discarded one is gone, even when another one takes its place. */
    orrery_rollback_snapshot_t old = id, fresh = 0;
    CHECK(orrery_rollback_discard(old) == 0);
    CHECK_ERROR(orrery_rollback_discard(old), ENOENT);
    CHECK_ERROR(orrery_rollback_resume(old, 1), ENOENT);
    got = orrery_rollback_snapshot(&fresh);
    CHECK(got >= 0 && fresh != old);
    if (got == 0) {
        CHECK_ERROR(orrery_rollback_resume(old, 1), ENOENT);
        orrery_rollback_resume(fresh, 2);
        CHECK(0);
    }
    CHECK(got == 2);
    return 0;
}
