/* A program with two threads: each switches for itself, and goes on in a context where it was. */
#include "check.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <orrery/context.h>

static int *go;
static pid_t root;
static int creator; /* in the context */
static int made;    /* in the root */
static __thread int own = 1;

static void *thread(void *argument) {
    int local = *(int *)argument;
    __atomic_fetch_add(go, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(go, __ATOMIC_SEQ_CST) != 2)
        sched_yield();
    uint64_t result;
    if (getpid() == root) {
        own = 2;
        CHECK(orrery_context_switch(made, 5, &result) == made && result == 31);
        CHECK(orrery_context_switch(made, 6, &result) == made && result == 32);
        CHECK(own == 2);
    } else {
        /* Where the thread was when the context was created, and with what it had then. */
        CHECK(own == 1 && local == 30);
        CHECK(orrery_context_switch(creator, (uint64_t)(local + own), &result) == creator && result == 6);
        own++;
        orrery_context_switch(creator, (uint64_t)(local + own), &result);
        CHECK(!"nobody comes back");
    }
    return NULL;
}

int main(void) {
    root = getpid();
    go = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(go != MAP_FAILED);
    pthread_t other;
    int local = 30;
    CHECK(pthread_create(&other, NULL, thread, &local) == 0);
    while (__atomic_load_n(go, __ATOMIC_SEQ_CST) != 1)
        sched_yield();
    int caller;
    uint64_t args;
    made = orrery_context_create(NULL, 0, 0, &caller, &args);
    if (getpid() != root) {
        creator = made;
        for (;;)
            orrery_context_switch(creator, args + 1, &args);
    }
    CHECK(made >= 0 && caller == -1);
    CHECK(orrery_context_switch(made, 7, &args) == made && args == 8);
    int alone = orrery_context_create(NULL, 0, ORRERY_CONTEXT_SINGLE_THREAD, &caller, &args);
    CHECK(alone >= 0);
    __atomic_store_n(go, 2, __ATOMIC_SEQ_CST);
    CHECK(pthread_join(other, NULL) == 0);
    CHECK(orrery_context_switch(made, 9, &args) == made && args == 10);
    CHECK(orrery_context_close(alone) == 0 && orrery_context_close(made) == 0);
    return 0;
}
