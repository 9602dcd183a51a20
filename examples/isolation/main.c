/*
 * Three tenants of a server, each with an instance of a library that has a bug: the instances alone, in contexts, or in orbits.
 *
 *     isolation LIBRARY instances|contexts|orbits
 *
 * The library is library/sums.c, built by orrery-cc. A hostile tenant sends a request that writes into another one's instance, and
 * one that crashes. Exits with 0 if that harms none of the others.
 */
#include <err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orrery/context.h>
#include <orrery/instance.h>
#include <orrery/orbit.h>

struct tenant {
    const char *name;
    struct orrery_instance *instance;
    int context;
    struct orrery_orbit *orbit;
};

/* How instances are kept apart. */
struct way {
    const char *name;
    void (*begin)(struct tenant *tenant);
    /* Returns what the library does, or -1 if it did not answer. */
    long (*ask)(struct tenant *tenant, const char *request);
    void (*end)(struct tenant *tenant);
    /* The sum of the hostile tenant after a crash. */
    long after_crash;
};

static long (*serve)(const char *request);
static int (*verify)(void);
static int harmed;

/* Serves a request in the instance, as the calling process has it. */
static long serve_here(struct tenant *tenant, const char *request) {
    if (orrery_instance_enter(tenant->instance) != 0)
        errx(1, "cannot enter an instance: %s", orrery_last_error());
    const long answer = serve(request);
    if (orrery_instance_leave(tenant->instance) != 0)
        errx(1, "cannot leave an instance: %s", orrery_last_error());
    return answer;
}

/* The same in a context or an orbit, which ends where the request has corrupted something. */
static long serve_apart(struct tenant *tenant, const char *request) {
    const long answer = serve_here(tenant, request);
    if (orrery_instance_enter(tenant->instance) != 0 || !verify() ||
        orrery_instance_leave(tenant->instance) != 0)
        abort();
    return answer;
}

/* ---- instances alone, which are no protection ---- */

static void begin_alone(struct tenant *tenant) { (void)tenant; }
static void end_alone(struct tenant *tenant) { (void)tenant; }

/* ---- in contexts ---- */

/* Saves the state of a tenant's context, in which it is found after a crash. */
static void save(struct tenant *tenant) {
    if (orrery_context_checkpoint(tenant->context) != 0)
        errx(1, "cannot save a context: %s", orrery_last_error());
}

static void begin_context(struct tenant *tenant) {
    int caller;
    uint64_t answer;
    tenant->context = orrery_context_create(NULL, 0, 0, &caller, &answer);
    if (tenant->context < 0)
        errx(1, "cannot create a context: %s", orrery_last_error());
    if (caller == -1) {
        save(tenant);
        return;
    }
    /* This is the new context: a copy of the program, of which it uses one instance. */
    for (;;) {
        char request[64];
        const size_t length = orrery_context_received(request, sizeof request - 1);
        request[length < sizeof request ? length : sizeof request - 1] = 0;
        answer = (uint64_t)serve_apart(tenant, request);
        const int next = orrery_context_switch(caller, answer, NULL);
        if (next < 0)
            errx(1, "cannot answer: %s", orrery_last_error());
    }
}

static long ask_context(struct tenant *tenant, const char *request) {
    uint64_t answer;
    const int from =
        orrery_context_switch_bytes(tenant->context, 0, request, strlen(request), 10000, &answer);
    /* After a crash, the state that was saved before is that of the context again. */
    save(tenant);
    return from < 0 ? -1 : (long)answer;
}

static void end_context(struct tenant *tenant) { orrery_context_close(tenant->context); }

/* ---- in orbits ---- */

struct task {
    struct tenant *tenant;
    char request[64];
};

static long serve_task(void *argument, void *store) {
    struct task *task = argument;
    (void)store;
    return serve_apart(task->tenant, task->request);
}

static void begin_orbit(struct tenant *tenant) {
    struct orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    options.restart = ORRERY_ORBIT_RESTART_ON_CRASH;
    options.time_limit_ms = 10000;
    tenant->orbit = orrery_orbit_create_with(tenant->name, serve_task, NULL, &options);
    if (tenant->orbit == NULL)
        errx(1, "cannot create an orbit: %s", orrery_last_error());
}

static long ask_orbit(struct tenant *tenant, const char *request) {
    struct task task = {.tenant = tenant};
    snprintf(task.request, sizeof task.request, "%s", request);
    return orrery_orbit_call(tenant->orbit, 0, NULL, &task, sizeof task);
}

static void end_orbit(struct tenant *tenant) {
    if (orrery_orbit_destroy(tenant->orbit) != 0)
        errx(1, "cannot end an orbit: %s", orrery_last_error());
}

/* A context continues from the state that was saved last, a restarted orbit from that of the program. */
static const struct way ways[] = {
    {"instances", begin_alone, serve_here, end_alone, 1},
    {"contexts", begin_context, ask_context, end_context, 1},
    {"orbits", begin_orbit, ask_orbit, end_orbit, 0},
};

/* ---- what tenants do ---- */

/* Sends a request and prints the answer, beside what the request is called here. */
static long ask_as(const struct way *way, struct tenant *tenant, const char *request, const char *called) {
    const long answer = way->ask(tenant, request);
    printf("%s: %s: ", tenant->name, called);
    printf(answer == -1 ? "no answer" : "%ld", answer);
    return answer;
}

static void ask(const struct way *way, struct tenant *tenant, const char *request, long right) {
    const int is_wrong = ask_as(way, tenant, request, request) != right;
    puts(is_wrong ? ", which is wrong" : "");
    harmed += is_wrong;
}

static void ask_hostile(const struct way *way, struct tenant *tenant, const char *request,
                        const char *called) {
    ask_as(way, tenant, request, called);
    puts("");
}

static void play(const struct way *way, struct tenant *ann, struct tenant *bob, struct tenant *eve) {
    const char *numbers_of_ann = orrery_instance_variable(ann->instance, "numbers");
    const char *numbers_of_eve = orrery_instance_variable(eve->instance, "numbers");
    const long distance = (numbers_of_ann - numbers_of_eve) / (long)sizeof(long);
    char into_another[64];
    snprintf(into_another, sizeof into_another, "put %ld 666", distance);

    ask(way, ann, "put 0 40", 40);
    ask(way, bob, "put 0 7", 7);
    ask(way, eve, "put 0 1", 1);
    ask_hostile(way, eve, into_another, "put into ann's numbers");
    ask(way, ann, "put 0 42", 42);
    ask_hostile(way, eve, "put 1152921504606846975 1", "put where nothing is");
    ask(way, eve, "sum", way->after_crash);
    ask(way, bob, "sum", 7);
    ask(way, ann, "sum", 42);
}

static void *find(struct orrery_instance_library *library, const char *name) {
    void *found = orrery_instance_symbol(library, name);
    if (found == NULL)
        errx(1, "cannot find %s: %s", name, orrery_last_error());
    return found;
}

int main(int argc, char **argv) {
    const struct way *way = NULL;
    for (size_t at = 0; argc == 3 && at < sizeof ways / sizeof *ways; at++)
        if (strcmp(argv[2], ways[at].name) == 0)
            way = &ways[at];
    if (way == NULL)
        errx(2, "usage: isolation LIBRARY instances|contexts|orbits");
    /* Of what is printed, nothing waits in memory of which contexts have copies. */
    setvbuf(stdout, NULL, _IONBF, 0);
    struct orrery_instance_library *library = orrery_instance_load(argv[1], NULL);
    if (library == NULL)
        errx(1, "cannot load %s: %s", argv[1], orrery_last_error());
    serve = (long (*)(const char *))find(library, "serve");
    verify = (int (*)(void))find(library, "verify");
    struct tenant tenants[] = {{.name = "ann"}, {.name = "bob"}, {.name = "eve"}};
    for (size_t at = 0; at < 3; at++) {
        tenants[at].instance = orrery_instance_create(library);
        if (tenants[at].instance == NULL)
            errx(1, "cannot create an instance: %s", orrery_last_error());
    }
    for (size_t at = 0; at < 3; at++)
        way->begin(&tenants[at]);
    play(way, &tenants[0], &tenants[1], &tenants[2]);
    for (size_t at = 0; at < 3; at++) {
        way->end(&tenants[at]);
        /* The program's own instances, of which the others are copies, have served nothing. */
        if (way->begin != begin_alone && serve_here(&tenants[at], "sum") != 0)
            harmed++;
        if (orrery_instance_destroy(tenants[at].instance) != 0)
            errx(1, "cannot destroy an instance: %s", orrery_last_error());
    }
    puts(harmed ? "the others were harmed" : "the others were not harmed");
    return harmed != 0;
}
