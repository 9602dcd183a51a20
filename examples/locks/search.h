/* The search for circles, wherever it is made. */
#ifndef LOCKS_SEARCH_H
#define LOCKS_SEARCH_H

#include "locks.h"

typedef void (*search_found)(struct transaction *victim, void *context);

/*
 * Finds circles that the waiting transaction is part of, and a victim for each. In main it leaves everything
 * as it was but the marks; `apart` says that all this is a copy, in which victims can be rolled back to look
 * for more.
 */
long search(struct transaction *waiting, bool apart, search_found found, void *context);

#endif
