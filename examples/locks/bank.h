/* What the locks are for: transactions that move money between accounts, two of them read beside. */
#ifndef LOCKS_BANK_H
#define LOCKS_BANK_H

#include "locks.h"

void bank_init(size_t accounts);

struct bank_report {
    uint64_t committed;
    uint64_t deadlocks; /* rollbacks after a verdict */
    uint64_t timeouts;  /* rollbacks after waiting too long */
};

/* Commits so many transactions, each as often as it takes. */
struct bank_report bank_work(struct transaction *transaction, uint64_t count);

/* Whether every account has what committed transactions, and only these, left there; says so if not. */
bool bank_is_right(void);

#endif
