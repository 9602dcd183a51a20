// The checking mode, turned on by the environment, names on standard error what a task touched that was not passed.
#include "check_orbit.h"

#include <fcntl.h>
#include <map>
#include <string>
#include <vector>

struct arguments {
    std::map<int, std::string> *table;
    long *pointer;
    const char *text;
};

extern "C" {
long some_global = 10;
static long reads_global(void *, void *) { return some_global; }
static long dereferences(void *argument, void *) { return *static_cast<arguments *>(argument)->pointer; }
static long measures(void *argument, void *) {
    return (long)strlen(static_cast<arguments *>(argument)->text);
}
static long counts(void *argument, void *) { return (long)static_cast<arguments *>(argument)->table->size(); }
static long works(void *, void *store) {
    /* Memory, files and numbers of the task's own, by way of the C library. */
    char *own = static_cast<char *>(malloc(20000)), text[100];
    FILE *file = fopen("/proc/self/stat", "r"), *out = fopen("/dev/null", "w");
    memset(own, 1, 20000);
    bool good = file && fgets(text, sizeof text, file) && out && fprintf(out, "%s %d", text, own[19999]) > 5;
    good = good && fclose(out) == 0 && fclose(file) == 0 && atoi(text) == getpid();
    std::vector<std::string> own_texts(100, std::string(50, 'x'));
    free(own);
    return good ? (long)own_texts.size() + ++*static_cast<long *>(store) : -1;
}
static void *init(void) { return calloc(1, sizeof(long)); }
}

static int errors[2];

/* What was written to standard error since the last time. */
static std::string told() {
    char text[8192];
    ssize_t length = read(errors[0], text, sizeof text);
    return std::string(text, length > 0 ? (size_t)length : 0);
}

static void finds(const std::string &text, const char *what, const char *where, const char *who) {
    bool found = text.find(what) != text.npos && text.find(where) != text.npos && text.find(who) != text.npos;
    if (!found)
        dprintf(1, "instead of %s, %s, %s: \"%s\"\n", what, where, who, text.c_str());
    CHECK(found);
}

int main() {
    CHECK(pipe2(errors, O_NONBLOCK) == 0 && setenv("ORRERY_ORBIT_CHECK", "1", 1) == 0);
    int before = dup(2);
    CHECK(dup2(errors[1], 2) == 2);
    orrery_area *area = orrery_area_create(1 << 20), *second = orrery_area_create(4096);
    std::map<int, std::string> &table = *new std::map<int, std::string>;
    table[1] = "one";
    char *name = static_cast<char *>(malloc(64));
    strcpy(name, "a name of the heap");
    orrery_orbit_options options = ORRERY_ORBIT_OPTIONS_INIT;
    orrery_orbit *orbit = orrery_orbit_create_with("checked", reads_global, init, &options);
    CHECK(area && second && orbit);
    arguments passed = {&table, NULL, name};
    long *in = static_cast<long *>(orrery_area_alloc(area, 64));
    *in = 7;
    passed.pointer = in;
#define CALL(function) orrery_orbit_call_function(orbit, 1, &area, function, &passed, sizeof passed)

    /* As of the creation, or passed: nothing to tell. */
    for (int round = 1; round <= 3; round++) {
        CHECK(CALL(reads_global) == 10 && CALL(dereferences) == 7 && CALL(measures) == 18 &&
              CALL(works) == 100 + round);
    }
    std::string text = told();
    if (!text.empty())
        dprintf(1, "told: %s\n", text.c_str());
    CHECK(text.empty());

    some_global = 20;
    CHECK(CALL(reads_global) == 10);
    finds(told(), "stale", "(some_global+0x0, 8 bytes)", "(reads_global");
    strcpy(name, "another name, longer than it");
    CHECK(CALL(measures) == 18);
    finds(told(), "stale", " bytes)", "libc");
    table[2] = "two";
    CHECK(CALL(counts) == 1);
    finds(told(), "stale", " bytes)", "in program+0x");
    CHECK(orrery_area_free(area, in) == 0);
    CALL(dereferences);
    finds(told(), "was freed before the call", "into a block of the area at ", "(dereferences");
    passed.pointer = static_cast<long *>(orrery_area_alloc(second, 8));
    CALL(dereferences);
    finds(told(), "the call does not name the area", "into the area at ", "(dereferences");
    CHECK(orrery_orbit_destroy(orbit) == 0 && unsetenv("ORRERY_ORBIT_CHECK") == 0);

    /* By the option; and areas as of the creation, where that is asked for. */
    *passed.pointer = 77;
    options.check = options.existing_areas = 1;
    orbit = orrery_orbit_create_with("by option", dereferences, init, &options);
    CHECK(orbit && CALL(dereferences) == 77);
    finds(told(), "the call does not name the area", "into the area at ", "(dereferences");
    CHECK(orrery_orbit_destroy(orbit) == 0);
    CHECK(dup2(before, 2) == 2);
    free(name);
    delete &table;
    return 0;
}
