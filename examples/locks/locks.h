/*
 * A lock manager: records are locked in shared and exclusive mode, requests that conflict wait in a queue for
 * each record.
 *
 * Locks, requests and transactions are in an orbit area, so that the deadlock detector sees them; condition
 * variables do not, as nobody but main's threads has to do with them. One mutex protects it all.
 */
#ifndef LOCKS_LOCKS_H
#define LOCKS_LOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <orrery/orbit.h>

enum mode { SHARED, EXCLUSIVE };

struct transaction;

struct lock {
    struct request *first; /* in the order in which they came */
};

struct request {
    struct request *next;         /* for the same record */
    struct request *next_of_same; /* of the same transaction */
    struct transaction *by;
    struct lock *lock;
    enum mode mode;
    bool granted;
};

struct transaction {
    size_t slot;
    uint64_t version;          /* counts up with each one in this slot */
    struct request *held;      /* all requests, granted or not */
    struct request *waits_for; /* NULL while it runs */
    unsigned weight;           /* what it has done: the less, the cheaper to roll back */
    bool cancel;               /* the detector's verdict */
    uint64_t mark;             /* the detector's own */
};

enum result { GRANTED, DEADLOCK, TIMEOUT };

/*
 * Who is asked, with the mutex held, when a request has to wait, and again while it does; and who is told after that,
 * without the mutex.
 */
typedef void (*locks_waiting)(struct transaction *transaction);
typedef void (*locks_left)(void);

void locks_init(size_t records, size_t slots, unsigned timeout_ms, locks_waiting waiting, locks_left left);

struct orrery_area *locks_area(void);
struct transaction *locks_transaction(size_t slot);
size_t locks_slots(void);

void locks_begin(struct transaction *transaction);

/* After DEADLOCK and TIMEOUT the transaction has to be rolled back. A record is locked once. */
enum result locks_acquire(struct transaction *transaction, size_t record, enum mode mode);

/* At the end, be it good or bad. */
void locks_release(struct transaction *transaction);

/* Whether a transaction has to wait for this one's sake: it is before it and in its way. For the detector,
 * too. */
bool locks_conflict(const struct request *before, const struct request *request);

void locks_enter(void);
void locks_leave(void);

/* Wakes the transaction in a slot: what the detector asks main to do. */
unsigned long locks_wake(size_t argc, unsigned long *argv);

#endif
