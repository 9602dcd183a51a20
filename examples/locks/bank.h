/* What the locks are for: transactions that move money between accounts, two of them read beside. */
#ifndef LOCKS_BANK_H
#define LOCKS_BANK_H

#include "locks.h"

/* Each step of a transaction computes for so many microseconds, beside what it does to its account. */
void bank_init(size_t accounts, uint64_t work);

struct bank_report {
    uint64_t committed;
    uint64_t deadlocks; /* rollbacks after a verdict */
    uint64_t timeouts;  /* rollbacks after waiting too long */
};

/* Commits so many transactions, each as often as it takes; fewer if it is stopped. */
struct bank_report bank_work(struct transaction *transaction, uint64_t count);

void bank_stop(void);

/* Whether every account has what committed transactions, and only these, left there; says so if not. */
bool bank_is_right(void);

#endif
