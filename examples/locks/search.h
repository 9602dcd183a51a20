/* The search for circles, wherever it is made. */
#ifndef LOCKS_SEARCH_H
#define LOCKS_SEARCH_H

#include "locks.h"

typedef void (*search_found)(struct transaction *victim, void *context);

/*
 * Finds the circles that the waiting transaction is part of, and a victim for each: tells of it, and marks it
 * as cancelled. Where this is a copy of main's memory, that is for the search to go on with. Returns how many
 * there are.
 */
long search(struct transaction *waiting, search_found found, void *context);

#endif
