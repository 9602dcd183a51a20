#include "locks.h"

#include <err.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <time.h>

/* A detector that died over a search has not answered it. */
#define ASK_AGAIN_MS 20

static struct orrery_area *area;
static struct lock *locks;
static struct transaction **transactions;
static size_t slot_count;
static unsigned timeout;
static locks_waiting on_waiting;
static locks_left on_left;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* One for each slot. Who is woken looks for itself what for. */
static sem_t *wake_ups;

static void *take(size_t size) {
    void *memory = orrery_area_alloc(area, size);
    if (!memory)
        errx(1, "%zu bytes: %s", size, orrery_last_error());
    return memory;
}

void locks_init(size_t records, size_t slots, unsigned timeout_ms, locks_waiting waiting, locks_left left) {
    area = orrery_area_create(4096);
    if (!area)
        errx(1, "cannot make an area: %s", orrery_last_error());
    locks = take(records * sizeof *locks);
    transactions = calloc(slots, sizeof *transactions);
    wake_ups = calloc(slots, sizeof *wake_ups);
    if (!transactions || !wake_ups)
        err(1, "%zu slots", slots);
    for (size_t i = 0; i < slots; i++) {
        transactions[i] = take(sizeof **transactions);
        transactions[i]->slot = i;
        sem_init(&wake_ups[i], 0, 0);
    }
    slot_count = slots;
    timeout = timeout_ms;
    on_waiting = waiting;
    on_left = left;
}

struct orrery_area *locks_area(void) {
    return area;
}
struct transaction *locks_transaction(size_t slot) {
    return transactions[slot];
}
size_t locks_slots(void) { return slot_count; }

void locks_enter(void) { pthread_mutex_lock(&mutex); }
void locks_leave(void) { pthread_mutex_unlock(&mutex); }

unsigned long locks_wake(size_t argc, unsigned long *argv) {
    if (argc != 1 || argv[0] >= slot_count)
        return 1;
    sem_post(&wake_ups[argv[0]]);
    return 0;
}

bool locks_conflict(const struct request *before, const struct request *request) {
    return before->by != request->by && (before->mode == EXCLUSIVE || request->mode == EXCLUSIVE);
}

static bool grantable(const struct request *request) {
    for (const struct request *before = request->lock->first; before != request; before = before->next) {
        if (locks_conflict(before, request))
            return false;
    }
    return true;
}

static void remove_request(struct request *request) {
    struct request **link = &request->lock->first;
    while (*link != request)
        link = &(*link)->next;
    *link = request->next;
    for (struct request *other = request->lock->first; other; other = other->next) {
        if (!other->granted && grantable(other)) {
            other->granted = true;
            sem_post(&wake_ups[other->by->slot]);
        }
    }
    orrery_area_free(area, request);
}

void locks_begin(struct transaction *transaction) {
    locks_enter();
    transaction->version++;
    transaction->weight = 0;
    transaction->cancel = false;
    locks_leave();
}

static struct timespec in(unsigned milliseconds) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    time.tv_sec += milliseconds / 1000;
    time.tv_nsec += (long)(milliseconds % 1000) * 1000000;
    if (time.tv_nsec >= 1000000000) {
        time.tv_sec++;
        time.tv_nsec -= 1000000000;
    }
    return time;
}

/* With the mutex held, but for the waiting. */
static enum result wait_for(struct request *request) {
    struct transaction *transaction = request->by;
    transaction->waits_for = request;
    for (unsigned waited = 0; waited < timeout; waited += ASK_AGAIN_MS) {
        on_waiting(transaction);
        struct timespec until = in(ASK_AGAIN_MS);
        bool in_time = true;
        while (!request->granted && !transaction->cancel && in_time) {
            locks_leave();
            on_left();
            in_time = sem_timedwait(&wake_ups[transaction->slot], &until) == 0 || errno != ETIMEDOUT;
            locks_enter();
        }
        if (request->granted || transaction->cancel)
            break;
    }
    transaction->waits_for = NULL;
    if (request->granted)
        return GRANTED;
    return transaction->cancel ? DEADLOCK : TIMEOUT;
}

enum result locks_acquire(struct transaction *transaction, size_t record, enum mode mode) {
    locks_enter();
    struct request *request = take(sizeof *request);
    request->by = transaction;
    request->lock = &locks[record];
    request->mode = mode;
    request->next_of_same = transaction->held;
    transaction->held = request;
    struct request **last = &request->lock->first;
    while (*last)
        last = &(*last)->next;
    *last = request;
    request->granted = grantable(request);
    enum result result = request->granted ? GRANTED : wait_for(request);
    if (result == GRANTED)
        transaction->weight++;
    locks_leave();
    return result;
}

void locks_release(struct transaction *transaction) {
    locks_enter();
    while (transaction->held) {
        struct request *request = transaction->held;
        transaction->held = request->next_of_same;
        remove_request(request);
    }
    transaction->cancel = false;
    locks_leave();
}
