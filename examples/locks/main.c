/*
 * A multi-threaded lock manager whose deadlock detector is an orbit. Order a bug for the detector, and see
 * what it does to the program: nothing.
 */
#include <err.h>
#include <getopt.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bank.h"
#include "detector.h"

static const char help[] =
    "usage: locks [OPTIONS]\n"
    "Threads move money between accounts, under locks; deadlocks are found and resolved.\n"
    "\n"
    "  --threads NUMBER        (8)\n"
    "  --transactions NUMBER   that each thread commits (2000)\n"
    "  --milliseconds NUMBER   for which they commit transactions, instead of so many\n"
    "  --work NUMBER           microseconds that each of a transaction's four steps computes (0)\n"
    "  --accounts NUMBER       (24)\n"
    "  --timeout MS            after which waiting for a lock is given up (200)\n"
    "  --detect async|sync|inline|fork|none\n"
    "                          in an orbit beside or between, in the thread itself, in a fork, or not "
    "(async)\n"
    "  --bug none|pointer|assertion|loop|lie\n"
    "                          what is wrong with the detector (none)\n"
    "  --every NUMBER          in every so many searches (500)\n";

static const char *const ways[] = {"async", "sync", "inline", "fork", "none", NULL};
static const char *const bugs[] = {"none", "pointer", "assertion", "loop", "lie", NULL};

static struct {
    uint64_t threads, transactions, milliseconds, work, accounts, timeout, every;
    enum detect detect;
    enum bug bug;
} options = {.threads = 8,
             .transactions = 2000,
             .accounts = 24,
             .timeout = 200,
             .every = 500,
             .detect = DETECT_ASYNC,
             .bug = BUG_NONE};

static uint64_t number(const char *option, const char *text, uint64_t least, uint64_t most) {
    char *end;
    unsigned long long value = strtoull(text, &end, 10);
    if (*end || end == text || *text == '-' || value < least || value > most)
        errx(2, "--%s: %s is no number from %" PRIu64 " to %" PRIu64, option, text, least, most);
    return value;
}

static int choice(const char *option, const char *text, const char *const *choices) {
    for (int i = 0; choices[i]; i++) {
        if (strcmp(text, choices[i]) == 0)
            return i;
    }
    errx(2, "--%s: there is no %s; see --help", option, text);
}

static void read_options(int argc, char **argv) {
    static const struct option known[] = {
        {"threads", required_argument, NULL, 't'},
        {"transactions", required_argument, NULL, 'n'},
        {"milliseconds", required_argument, NULL, 'm'},
        {"work", required_argument, NULL, 'c'},
        {"accounts", required_argument, NULL, 'a'},
        {"timeout", required_argument, NULL, 'w'},
        {"detect", required_argument, NULL, 'd'},
        {"bug", required_argument, NULL, 'b'},
        {"every", required_argument, NULL, 'e'},
        {"help", no_argument, NULL, 'h'},
        {NULL, 0, NULL, 0},
    };
    int option, index = 0;
    while ((option = getopt_long(argc, argv, "", known, &index)) != -1) {
        const char *name = known[index].name;
        switch (option) {
        case 't':
            options.threads = number(name, optarg, 1, 1000);
            break;
        case 'n':
            options.transactions = number(name, optarg, 1, UINT32_MAX);
            break;
        case 'm':
            options.milliseconds = number(name, optarg, 1, 3600 * 1000);
            break;
        case 'c':
            options.work = number(name, optarg, 0, 1000000);
            break;
        case 'a':
            options.accounts = number(name, optarg, 4, 1 << 20);
            break;
        case 'w':
            options.timeout = number(name, optarg, 1, 60000);
            break;
        case 'd':
            options.detect = (enum detect)choice(name, optarg, ways);
            break;
        case 'b':
            options.bug = (enum bug)choice(name, optarg, bugs);
            break;
        case 'e':
            options.every = number(name, optarg, 1, UINT32_MAX);
            break;
        case 'h':
            fputs(help, stdout);
            exit(0);
        default:
            fputs(help, stderr);
            exit(2);
        }
    }
    if (optind < argc)
        errx(2, "what is %s? See --help", argv[optind]);
}

static void *work(void *report) {
    struct bank_report *mine = report;
    /* The report's place holds the slot until there is one. */
    uint64_t count = options.milliseconds ? UINT64_MAX : options.transactions;
    *mine = bank_work(locks_transaction(mine->committed), count);
    return NULL;
}

static double seconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void tell_of_detector(const struct detector_report *detector) {
    double each = detector->searches ? (double)detector->searches_ns / (double)detector->searches / 1e3 : 0;
    printf("searches: %" PRIu64 " (%.3f us of the lock manager's time each)\n", detector->searches, each);
    printf("verdicts: %" PRIu64 " applied, %" PRIu64 " too late, %" PRIu64 " refused\n", detector->found,
           detector->stale, detector->refused);
    printf("the detector: failed in %" PRIu64 " searches, was not there for %" PRIu64 ", came back %" PRIu64
           " times\n",
           detector->failed, detector->not_made, detector->restarts + detector->made_anew);
    if (detector->trouble[0])
        printf("its first trouble: %s\n", detector->trouble);
}

int main(int argc, char **argv) {
    read_options(argc, argv);
    bank_init(options.accounts, options.work);
    locks_init(options.accounts, options.threads, (unsigned)options.timeout, detector_search, detector_go);
    detector_start(options.detect, options.bug, options.every);

    pthread_t *threads = calloc(options.threads, sizeof *threads);
    struct bank_report *reports = calloc(options.threads, sizeof *reports), all = {0};
    if (!threads || !reports)
        err(1, "%" PRIu64 " threads", options.threads);
    double begin = seconds();
    for (size_t i = 0; i < options.threads; i++) {
        reports[i].committed = i;
        if (pthread_create(&threads[i], NULL, work, &reports[i]) != 0)
            errx(1, "cannot start thread %zu", i);
    }
    if (options.milliseconds) {
        struct timespec time = {(time_t)(options.milliseconds / 1000),
                                (long)(options.milliseconds % 1000) * 1000000};
        nanosleep(&time, NULL);
        bank_stop();
    }
    for (size_t i = 0; i < options.threads; i++) {
        pthread_join(threads[i], NULL);
        all.committed += reports[i].committed;
        all.deadlocks += reports[i].deadlocks;
        all.timeouts += reports[i].timeouts;
    }
    double took = seconds() - begin;
    struct detector_report detector = detector_stop();

    bool enough = options.milliseconds || all.committed == options.threads * options.transactions;
    bool right = bank_is_right() && enough;
    printf("%" PRIu64 " threads, %" PRIu64 " accounts, detector: %s, bug: %s", options.threads,
           options.accounts, ways[options.detect], bugs[options.bug]);
    if (options.bug != BUG_NONE)
        printf(" in every search of %" PRIu64, options.every);
    printf("\ntransactions: %" PRIu64 " in %.2f s, %.0f/s\n", all.committed, took,
           (double)all.committed / took);
    printf("rolled back and repeated: %" PRIu64 " after deadlocks, %" PRIu64 " after waiting %" PRIu64
           " ms\n",
           all.deadlocks, all.timeouts, options.timeout);
    if (options.detect != DETECT_NONE)
        tell_of_detector(&detector);
    printf("the program: %s\n", right ? "every transaction is in the books" : "TRANSACTIONS ARE LOST");
    free(threads);
    free(reports);
    return right ? 0 : 1;
}
