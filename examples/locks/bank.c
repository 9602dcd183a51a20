#include "bank.h"

#include <err.h>
#include <inttypes.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define STEPS 4
#define START 1000

/* Balances are protected by their locks; `due` is what they should come to, without any locks. */
static long *balances;
static atomic_long *due;
static size_t accounts;
static uint64_t step_ns;
static atomic_bool stopped;

void bank_init(size_t count, uint64_t work) {
    accounts = count;
    step_ns = work * 1000;
    balances = calloc(count, sizeof *balances);
    due = calloc(count, sizeof *due);
    if (!balances || !due)
        err(1, "%zu accounts", count);
    for (size_t i = 0; i < count; i++) {
        balances[i] = START;
        atomic_init(&due[i], START);
    }
}

/* What a transaction does to which account; a change of 0 only reads. */
struct step {
    size_t account;
    long change;
};

static uint64_t random_number(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void plan(struct step *steps, uint64_t *state) {
    for (size_t i = 0; i < STEPS; i++) {
        bool again;
        do {
            steps[i].account = random_number(state) % accounts;
            again = false;
            for (size_t j = 0; j < i; j++)
                again = again || steps[j].account == steps[i].account;
        } while (again);
        steps[i].change = 0;
    }
    size_t from = random_number(state) % STEPS, to = (from + 1 + random_number(state) % (STEPS - 1)) % STEPS;
    steps[to].change = 1 + (long)(random_number(state) % 10);
    steps[from].change = -steps[to].change;
}

/* Who only reads has a shared lock, and may not write, be it the same. */
static void change(const struct step *step, long amount) {
    if (amount != 0)
        balances[step->account] += amount;
}

static uint64_t processor_time(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

/* What a transaction has to do beside waiting for locks. */
static void compute(void) {
    if (step_ns == 0)
        return;
    uint64_t begin = processor_time();
    while (processor_time() - begin < step_ns) {
    }
}

static enum result attempt(struct transaction *transaction, const struct step *steps) {
    locks_begin(transaction);
    size_t done = 0;
    enum result result = GRANTED;
    for (; done < STEPS && result == GRANTED; done++) {
        result = locks_acquire(transaction, steps[done].account, steps[done].change ? EXCLUSIVE : SHARED);
        if (result != GRANTED)
            break;
        change(&steps[done], steps[done].change);
        compute();
        /* Somebody else's turn, to have some conflicts. */
        sched_yield();
    }
    for (size_t i = 0; i < done; i++) {
        if (result != GRANTED)
            change(&steps[i], -steps[i].change);
        else
            atomic_fetch_add(&due[steps[i].account], steps[i].change);
    }
    locks_release(transaction);
    return result;
}

struct bank_report bank_work(struct transaction *transaction, uint64_t count) {
    struct bank_report report = {0};
    uint64_t state = 0x9e3779b97f4a7c15 * (transaction->slot + 1);
    while (report.committed < count && !atomic_load_explicit(&stopped, memory_order_relaxed)) {
        struct step steps[STEPS];
        plan(steps, &state);
        enum result result;
        while ((result = attempt(transaction, steps)) != GRANTED) {
            report.deadlocks += result == DEADLOCK;
            report.timeouts += result == TIMEOUT;
        }
        report.committed++;
    }
    return report;
}

void bank_stop(void) { atomic_store(&stopped, true); }

bool bank_is_right(void) {
    bool right = true;
    long sum = 0;
    for (size_t i = 0; i < accounts; i++) {
        long wanted = atomic_load(&due[i]);
        sum += balances[i];
        if (balances[i] == wanted)
            continue;
        fprintf(stderr, "account %zu has %ld instead of %ld\n", i, balances[i], wanted);
        right = false;
    }
    if (sum != (long)accounts * START) {
        fprintf(stderr, "there is %ld instead of %ld\n", sum, (long)accounts * START);
        right = false;
    }
    return right;
}
