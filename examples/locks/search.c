#include "search.h"

/* The circle that closes, seen from its end. */
struct circle {
    struct transaction *start;
    struct transaction *victim;
    uint64_t mark;
};

static void consider(struct circle *circle, struct transaction *member) {
    struct transaction *victim = circle->victim;
    if (!victim || member->weight < victim->weight ||
        (member->weight == victim->weight && member->slot > victim->slot))
        circle->victim = member;
}

/* Whether a way leads from here to the start. No transaction is visited twice. */
static bool leads_back(struct transaction *here, struct circle *circle) {
    const struct request *waiting = here->waits_for;
    if (!waiting || waiting->granted || here->cancel)
        return false;
    for (struct request *before = waiting->lock->first; before && before != waiting; before = before->next) {
        struct transaction *next = before->by;
        if (!locks_conflict(before, waiting))
            continue;
        if (next != circle->start && next->mark == circle->mark)
            continue;
        next->mark = circle->mark;
        if (next == circle->start || leads_back(next, circle)) {
            consider(circle, here);
            return true;
        }
    }
    return false;
}

long search(struct transaction *waiting, search_found found, void *context) {
    static uint64_t mark;
    long victims = 0;
    do {
        /* Marks of earlier searches may be in the copy that an orbit got, made by main or not: these are
         * larger. */
        mark = mark > waiting->mark ? mark + 1 : waiting->mark + 1;
        struct circle circle = {waiting, NULL, mark};
        if (!leads_back(waiting, &circle))
            break;
        victims++;
        found(circle.victim, context);
        /* A wait may close several circles. */
        circle.victim->cancel = true;
    } while (!waiting->cancel);
    return victims;
}
