/* Signals that arrive in the midst of calls are handled behind them, on the program's stack; handlers may
 * call, too. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>

#include "check.h"

static char *low, *high;
static volatile int *handled;
static volatile orrery_rollback_snapshot_t *stale;

static void handler(int signal) {
    orrery_rollback_snapshot_t mine;
    volatile char here = (char)signal;
    int saved = errno;
    CHECK((char *)(uintptr_t)&here >= low && (char *)(uintptr_t)&here < high);
    ++*handled;
    int got = orrery_rollback_snapshot(&mine);
    CHECK(got >= 0 && here == (char)signal);
    here = 0;
    if (got == 0) {
        orrery_rollback_resume(mine, 1);
        CHECK(0);
    }
    CHECK(orrery_rollback_discard(mine) == 0);
    errno = saved;
}

int main(void) {
    pthread_attr_t attributes;
    void *address;
    size_t size;
    CHECK(pthread_getattr_np(pthread_self(), &attributes) == 0);
    CHECK(pthread_attr_getstack(&attributes, &address, &size) == 0);
    low = (char *)address;
    high = low + size;
    pthread_attr_destroy(&attributes);
    handled = (volatile int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(handled != MAP_FAILED);
    stale = (volatile orrery_rollback_snapshot_t *)(handled + 16);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    for (volatile int *rounds = handled + 1; *rounds < 400; ++*rounds) {
        orrery_rollback_snapshot_t id = 0;
        /* Sooner and later into the calls below; one shot, or there would be no time for anything else. */
        struct itimerval once = {{0, 0}, {0, 1 + *rounds * 7}};
        CHECK(setitimer(ITIMER_REAL, &once, NULL) == 0);
        int got = orrery_rollback_snapshot(&id);
        CHECK(got >= 0);
        if (got < 2) {
            orrery_rollback_resume(id, got + 1);
            CHECK(0);
        }
        CHECK(id != *stale);
        *stale = id;
        CHECK(orrery_rollback_discard(id) == 0);
    }
    CHECK(*handled > 0);
    return 0;
}
