#include "detector.h"

#include <err.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "search.h"

/* A search takes microseconds; one that takes this long will never end. */
#define TIME_LIMIT_MS 100

/* How long the detector may be away. */
#define PATIENCE_NS 50000000

static enum detect how;
static enum bug bug;
static uint64_t every;
static struct orrery_orbit *orbit;
static struct detector_report report;

/* A search failed, and who knows whether the orbit is back. */
static bool suspect;

/* ---- in the orbit ---- */

struct question {
    struct transaction *waiting;
    enum bug bug;
};

/* Which transaction the verdict is about: main asks whether it is still the one that waits in that slot. */
struct verdict {
    size_t slot;
    uint64_t version;
};

static int *volatile nowhere;

static void have_bug(enum bug which) {
    switch (which) {
    case BUG_POINTER:
        *nowhere = 1;
        break;
    case BUG_ASSERTION:
        /* As assert(3) does, but for the noise. */
        abort();
    case BUG_LOOP:
        for (;;)
            __asm__ volatile("");
    case BUG_LIE:
    case BUG_NONE:
        break;
    }
}

static void push_verdict(struct transaction *victim, void *context) {
    (void)context;
    struct verdict verdict = {victim->slot, victim->version};
    unsigned long slot = victim->slot;
    bool cancel = true;
    orrery_orbit_update *update = orrery_orbit_update_create();
    orrery_orbit_update_add_data(update, &verdict, sizeof verdict);
    orrery_orbit_update_add_modify(update, &victim->cancel, &cancel, sizeof cancel);
    orrery_orbit_update_add_operation(update, locks_wake, 1, &slot);
    orrery_orbit_push(update);
    orrery_orbit_update_destroy(update);
}

static long check_and_resolve(void *argument, void *store) {
    (void)store;
    const struct question *question = argument;
    if (question->bug == BUG_LIE) {
        struct transaction invented = {.slot = 1000000};
        push_verdict(&invented, NULL);
        return 1;
    }
    have_bug(question->bug);
    return search(question->waiting, push_verdict, NULL);
}

/* ---- in main: verdicts ---- */

/* With the mutex held. */
static bool still_waits(const struct verdict *verdict) {
    struct transaction *transaction = locks_transaction(verdict->slot);
    const struct request *request = transaction->waits_for;
    return transaction->version == verdict->version && request && !request->granted && !transaction->cancel;
}

/* With the mutex held: what came, if it makes sense and is not too late. */
static void handle(orrery_orbit_update *update) {
    const struct orrery_orbit_record *record = orrery_orbit_update_first(update);
    struct verdict verdict;
    if (!record || record->type != ORRERY_ORBIT_RECORD_DATA || record->size != sizeof verdict) {
        report.refused++;
        return;
    }
    memcpy(&verdict, record->data, sizeof verdict);
    if (verdict.slot >= locks_slots())
        report.refused++;
    else if (!still_waits(&verdict))
        report.stale++;
    else if (orrery_orbit_apply(update) < 0)
        report.refused++;
    else
        report.found++;
}

/* With the mutex held. */
static void handle_all(struct orrery_orbit_future *future) {
    orrery_orbit_update update;
    long got;
    while ((got = orrery_orbit_pull(future, &update)) == 1 || (got < 0 && errno == EBADMSG)) {
        if (got < 0) {
            report.refused++;
            continue;
        }
        handle(&update);
        orrery_orbit_update_destroy(&update);
    }
    if (got < 0) {
        report.failed++;
        suspect = true;
        if (report.failed == 1)
            snprintf(report.trouble, sizeof report.trouble, "%s", orrery_last_error());
    }
}

/* ---- in main: the resolver, a thread that waits for asynchronous searches ---- */

static struct pending {
    struct pending *next;
    struct orrery_orbit_future *future;
} * first, **last = &first;
static bool stopping;
static pthread_t resolver;
static pthread_mutex_t pending_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pending_condition = PTHREAD_COND_INITIALIZER;

static void add_pending(struct orrery_orbit_future *future) {
    struct pending *pending = malloc(sizeof *pending);
    if (!pending)
        err(1, "a search");
    *pending = (struct pending){NULL, future};
    pthread_mutex_lock(&pending_mutex);
    *last = pending;
    last = &pending->next;
    pthread_mutex_unlock(&pending_mutex);
}

static struct pending *next_pending(void) {
    pthread_mutex_lock(&pending_mutex);
    while (!first && !stopping)
        pthread_cond_wait(&pending_condition, &pending_mutex);
    struct pending *pending = first;
    if (pending && !(first = pending->next))
        last = &first;
    pthread_mutex_unlock(&pending_mutex);
    return pending;
}

static void *resolve(void *nothing) {
    struct pending *pending;
    while ((pending = next_pending())) {
        /* The task may take until its time limit: do not keep the lock manager waiting. */
        orrery_orbit_future_get(pending->future);
        locks_enter();
        handle_all(pending->future);
        locks_leave();
        orrery_orbit_future_destroy(pending->future);
        free(pending);
    }
    return nothing;
}

/* ---- in main: searches ---- */

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

static uint64_t created;

static void create(void) {
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.when_full = ORRERY_ORBIT_FULL_FAIL;
    options.queue = 4 * (unsigned)locks_slots();
    options.time_limit_ms = TIME_LIMIT_MS;
    orbit = orrery_orbit_create_with("deadlock detector", check_and_resolve, NULL, &options);
    if (!orbit)
        errx(1, "cannot make the detector: %s", orrery_last_error());
    created = now();
}

void detector_start(enum detect how_, enum bug bug_, uint64_t every_) {
    how = how_;
    bug = bug_;
    every = every_;
    if (how == DETECT_ASYNC || how == DETECT_SYNC)
        create();
    if (how == DETECT_ASYNC && pthread_create(&resolver, NULL, resolve, NULL) != 0)
        errx(1, "cannot start the resolver");
}

/*
 * Whether there is a detector to ask. One that crashes again and again comes back later each time; if that
 * takes too long, there will be another one.
 */
static bool is_there(void) {
    if (!suspect)
        return true;
    bool alive = orrery_orbit_alive(orbit) == 1;
    if (!alive && now() - created > PATIENCE_NS) {
        report.restarts += (uint64_t)orrery_orbit_restarts(orbit);
        report.made_anew++;
        orrery_orbit_destroy(orbit);
        create();
        alive = true;
    }
    suspect = !alive;
    return alive;
}

static void search_in_orbit(const struct question *question) {
    struct orrery_area *area = locks_area();
    struct orrery_orbit_future *future = NULL;
    if (is_there())
        future = orrery_orbit_call_async(orbit, 0, 1, &area, NULL, question, sizeof *question);
    if (!future) {
        report.not_made++;
        return;
    }
    if (how == DETECT_ASYNC) {
        add_pending(future);
        return;
    }
    orrery_orbit_future_get(future);
    handle_all(future);
    orrery_orbit_future_destroy(future);
}

/* The old way: no copy, no protection. */
static void cancel_and_wake(struct transaction *victim, void *context) {
    (void)context;
    unsigned long slot = victim->slot;
    victim->cancel = true;
    locks_wake(1, &slot);
    report.found++;
}

static void tell_parent(struct transaction *victim, void *context) {
    struct verdict verdict = {victim->slot, victim->version};
    if (write(*(int *)context, &verdict, sizeof verdict) != sizeof verdict)
        _exit(1);
}

static void search_in_fork(const struct question *question) {
    int ends[2];
    if (pipe(ends) < 0)
        err(1, "pipe");
    pid_t child = fork();
    if (child < 0)
        err(1, "fork");
    if (child == 0) {
        have_bug(question->bug);
        search(question->waiting, tell_parent, &ends[1]);
        _exit(0);
    }
    close(ends[1]);
    struct verdict verdict;
    while (read(ends[0], &verdict, sizeof verdict) == sizeof verdict)
        cancel_and_wake(locks_transaction(verdict.slot), NULL);
    close(ends[0]);
    int status;
    if (waitpid(child, &status, 0) == child && status != 0)
        report.failed++;
}

void detector_search(struct transaction *transaction) {
    struct question question = {transaction, BUG_NONE};
    if (how == DETECT_NONE)
        return;
    if (++report.searches % every == 0)
        question.bug = bug;
    uint64_t begin = now();
    switch (how) {
    case DETECT_ASYNC:
    case DETECT_SYNC:
        search_in_orbit(&question);
        break;
    case DETECT_INLINE:
        have_bug(question.bug);
        search(transaction, cancel_and_wake, NULL);
        break;
    case DETECT_FORK:
        search_in_fork(&question);
        break;
    case DETECT_NONE:
        break;
    }
    report.searches_ns += now() - begin;
}

void detector_go(void) {
    if (how == DETECT_ASYNC)
        pthread_cond_signal(&pending_condition);
}

struct detector_report detector_stop(void) {
    if (how == DETECT_ASYNC) {
        pthread_mutex_lock(&pending_mutex);
        stopping = true;
        pthread_cond_signal(&pending_condition);
        pthread_mutex_unlock(&pending_mutex);
        pthread_join(resolver, NULL);
    }
    if (orbit) {
        report.restarts += (uint64_t)orrery_orbit_restarts(orbit);
        orrery_orbit_destroy(orbit);
    }
    return report;
}
