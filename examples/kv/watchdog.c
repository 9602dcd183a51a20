#include "watchdog.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clock.h"
#include "settings.h"

/* Ages beyond this many seconds are all the same. */
#define AGES 65536

/* The longest key that is pushed back, and how many bytes of them at once. */
#define LONGEST_KEY 4096
#define BATCH ((size_t)32 << 10)

struct question {
    enum trouble trouble;
    const struct table *keys;
    uint64_t in_use;
    uint64_t most;  /* bytes, or 0 */
    uint64_t evict; /* bytes to be freed, or 0 */
    uint32_t now;   /* seconds */
};

/* What comes back: a report, or a key to evict behind its first field. */
enum kind { REPORT, VICTIM };

struct report {
    enum kind kind;
    struct census census;
};

/* ---- in the orbit ---- */

struct round {
    const struct question *question;
    struct report report;
    uint64_t *bytes_of_age;
    size_t seen;
    uint32_t limit;  /* the age from which keys go */
    uint64_t excess; /* what is still to be freed */
    orrery_orbit_update *update;
    size_t batch;
};

static uint32_t age_of(const struct round *round, const struct entry *entry) {
    uint32_t now = round->question->now;
    uint32_t age = now > entry->accessed ? now - entry->accessed : 0;
    return age < AGES ? age : AGES - 1;
}

static void count(struct node *node, void *context) {
    struct round *round = context;
    const struct entry *entry = (const struct entry *)node;
    if (round->seen++ == round->question->keys->count / 2)
        trouble_make(round->question->trouble);
    round->report.census.of[entry->type].keys++;
    round->report.census.of[entry->type].bytes += entry->bytes;
    if (entry->bytes > round->report.census.largest)
        round->report.census.largest = entry->bytes;
    if (round->bytes_of_age)
        round->bytes_of_age[age_of(round, entry)] += entry->bytes;
}

static void choose(struct node *node, void *context) {
    struct round *round = context;
    const struct entry *entry = (const struct entry *)node;
    if (round->excess == 0 || age_of(round, entry) < round->limit || node->key_length > LONGEST_KEY)
        return;
    char record[sizeof(enum kind) + LONGEST_KEY];
    enum kind kind = VICTIM;
    memcpy(record, &kind, sizeof kind);
    memcpy(record + sizeof kind, node->key, node->key_length);
    orrery_orbit_update_add_data(round->update, record, sizeof kind + node->key_length);
    round->batch += node->key_length;
    if (round->batch > BATCH) {
        orrery_orbit_push(round->update);
        round->batch = 0;
    }
    round->excess -= entry->bytes < round->excess ? entry->bytes : round->excess;
}

/* Older keys first, as far as seconds tell them apart. */
static void choose_victims(struct round *round) {
    round->excess = round->question->evict;
    uint64_t older = 0;
    uint32_t age = AGES;
    while (age > 0 && older < round->excess)
        older += round->bytes_of_age[--age];
    /* Of the youngest age that is touched only a part has to go. */
    round->limit = age + 1;
    table_each(round->question->keys, choose, round);
    round->limit = age;
    table_each(round->question->keys, choose, round);
}

static long look(void *argument, void *store) {
    const struct question *question = argument;
    struct round round = {
        .question = question, .report.kind = REPORT, .update = orrery_orbit_update_create()};
    if (question->evict > 0) {
        round.bytes_of_age = store;
        memset(store, 0, AGES * sizeof *round.bytes_of_age);
    }
    table_each(question->keys, count, &round);
    if (question->keys->count == 0)
        trouble_make(question->trouble);
    if (question->most > 0 && question->in_use > question->most - question->most / 10)
        snprintf(round.report.census.warning, sizeof round.report.census.warning,
                 "%" PRIu64 " of %" PRIu64 " bytes are in use", question->in_use, question->most);
    orrery_orbit_update_add_data(round.update, &round.report, sizeof round.report);
    if (question->evict > 0)
        choose_victims(&round);
    orrery_orbit_push(round.update);
    orrery_orbit_update_destroy(round.update);
    return 0;
}

static void *make_ages(void) { return malloc(AGES * sizeof(uint64_t)); }

/* ---- in main ---- */

static struct census census;
static int64_t next_round;

const struct census *watchdog_census(void) { return &census; }

static bool take_report(const void *data, size_t size) {
    struct report report;
    if (size != sizeof report)
        return false;
    memcpy(&report, data, sizeof report);
    report.census.warning[sizeof report.census.warning - 1] = 0;
    if (report.census.warning[0] && !census.warning[0])
        fprintf(stderr, "watchdog: %s\n", report.census.warning);
    report.census.rounds = census.rounds + 1;
    report.census.evicted = census.evicted;
    census = report.census;
    return true;
}

/* Main knows best how much is in use now, and whether the key is still there. */
static bool take_victim(struct slice key) {
    if (settings.max_memory == 0 || !settings.evict)
        return false;
    if (memory_in_use_everywhere() <= (uint64_t)settings.max_memory)
        return true;
    struct entry *entry = store_find(key);
    if (entry) {
        store_delete(entry);
        census.evicted++;
    }
    return true;
}

static bool take(const void *data, size_t size, uint64_t context) {
    (void)context;
    enum kind kind;
    if (size < sizeof kind)
        return false;
    memcpy(&kind, data, sizeof kind);
    if (kind == REPORT)
        return take_report(data, size);
    return kind == VICTIM &&
           take_victim((struct slice){(const char *)data + sizeof kind, size - sizeof kind});
}

static void done(long value, const char *trouble, uint64_t context) {
    (void)value, (void)trouble, (void)context;
}

static void create(void) {
    struct orrery_orbit_options options = companion_short_task();
    companion_create(&watchdog.companion, look, make_ages, &options);
}

static bool call(enum trouble trouble) {
    static const struct sight sight = {1, {MEMORY_INDEX}};
    uint64_t in_use = memory_in_use_everywhere(), most = (uint64_t)settings.max_memory;
    bool too_much = most > 0 && settings.evict && in_use > most;
    struct question question = {.trouble = trouble,
                                .keys = store_table(),
                                .in_use = in_use,
                                .most = most,
                                /* A little more, so that there is room until the next round. */
                                .evict = too_much ? in_use - most + most / 50 : 0,
                                .now = (uint32_t)(clock_milliseconds() / 1000)};
    next_round = clock_microseconds() + settings.watchdog_interval * 1000;
    return companion_call(&watchdog.companion, &sight, &question, sizeof question,
                          (struct handler){.data = take, .done = done});
}

static void tick(void) {
    bool due = clock_microseconds() >= next_round && settings.watchdog_interval > 0;
    if (due && watchdog.companion.under_way == 0)
        call(TROUBLE_NONE);
}

struct auxiliary watchdog = {.companion.name = "watchdog", .create = create, .tick = tick, .call = call};
