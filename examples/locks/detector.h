/*
 * The deadlock detector, as in Figures 2, 4 and 7 of the paper: it searches the graph of who waits for whom
 * for a circle, and pushes back a victim to roll back.
 */
#ifndef LOCKS_DETECTOR_H
#define LOCKS_DETECTOR_H

#include "locks.h"

enum detect {
    DETECT_ASYNC,  /* in an orbit, while the transaction waits anyway */
    DETECT_SYNC,   /* in an orbit, and the lock manager waits for it */
    DETECT_INLINE, /* in the waiting thread, as without orbits */
    DETECT_FORK,   /* in a process that is forked for each search */
    DETECT_NONE    /* not at all: waiting times out */
};

/* What is wrong with the detector. */
enum bug { BUG_NONE, BUG_POINTER, BUG_ASSERTION, BUG_LOOP, BUG_LIE };

struct detector_report {
    uint64_t searches;
    uint64_t searches_ns; /* for which the lock manager stood still */
    uint64_t not_made;    /* as there was no detector at that moment */
    uint64_t failed;      /* searches that the detector did not survive */
    uint64_t found;       /* victims that were rolled back */
    uint64_t stale;       /* verdicts on transactions that had gone on meanwhile */
    uint64_t refused;     /* verdicts that made no sense */
    uint64_t restarts;
    uint64_t made_anew; /* as it was not restarted any more */
    char trouble[200];  /* the first one */
};

/* With the bug in every so many searches. */
void detector_start(enum detect how, enum bug bug, uint64_t every);

/* A transaction begins to wait; the mutex is held. */
void detector_search(struct transaction *transaction);

/* What of it needs no mutex. */
void detector_go(void);

/* Ends the detector: what it had found so far is in the report. */
struct detector_report detector_stop(void);

#endif
