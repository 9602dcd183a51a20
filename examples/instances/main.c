/*
 * A thousand SQLites in one process: as instances of one library, by dlmopen(3), and in a process each. Every one of them
 * creates a table, inserts into it, and answers a query; the answers are compared with what they must be.
 */
#include <dlfcn.h>
#include <err.h>
#include <orrery/instance.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct sqlite3 sqlite3;
typedef struct sqlite3_stmt sqlite3_stmt;

/* What is called of SQLite, with the types that sqlite3.h gives. */
struct sqlite {
    const char *(*version)(void);
    int (*open)(const char *, sqlite3 **);
    int (*exec)(sqlite3 *, const char *, int (*)(void *, int, char **, char **), void *, char **);
    int (*prepare)(sqlite3 *, const char *, int, sqlite3_stmt **, const char **);
    int (*step)(sqlite3_stmt *);
    int64_t (*column)(sqlite3_stmt *, int);
    int (*finalize)(sqlite3_stmt *);
};

enum { SQLITE_OK = 0, SQLITE_ROW = 100, ROWS = 100 };

/* What the copies of one kind took: sums at first, then of each. */
struct result {
    unsigned made;   /* how many there were in the end */
    unsigned right;  /* how many of them answered rightly */
    double create;   /* microseconds to make one */
    double query;    /* microseconds to open a database, fill and ask it */
    double new_kib;  /* private memory of one that was made, in KiB */
    double used_kib; /* the same with its database */
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

/* Private memory of a process, in KiB. */
static double private_memory(const char *process) {
    char path[64], line[256];
    double kib = 0;
    snprintf(path, sizeof path, "/proc/%s/smaps_rollup", process);
    FILE *file = fopen(path, "r");
    if (!file)
        err(1, "cannot read %s", path);
    while (fgets(line, sizeof line, file)) {
        unsigned long value;
        if (sscanf(line, "Private_Dirty: %lu kB", &value) == 1)
            kib = (double)value;
    }
    fclose(file);
    return kib;
}

typedef void *(*find_function)(void *library, const char *name);

static void *find_in_library(void *library, const char *name) {
    return orrery_instance_symbol((struct orrery_instance_library *)library, name);
}

static struct sqlite find_sqlite(find_function find, void *library) {
    struct sqlite sqlite;
    const struct {
        const char *name;
        void *place;
    } functions[] = {
        {"sqlite3_libversion", &sqlite.version}, {"sqlite3_open", &sqlite.open},
        {"sqlite3_exec", &sqlite.exec},          {"sqlite3_prepare_v2", &sqlite.prepare},
        {"sqlite3_step", &sqlite.step},          {"sqlite3_column_int64", &sqlite.column},
        {"sqlite3_finalize", &sqlite.finalize},
    };
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *address = find(library, functions[i].name);
        if (!address)
            errx(1, "the library has no %s", functions[i].name);
        memcpy(functions[i].place, &address, sizeof address);
    }
    return sqlite;
}

/* Fills a database in memory with what only this number gives, and returns whether a query says so. The database stays open. */
static int answers_rightly(const struct sqlite *sqlite, unsigned number) {
    char text[256];
    sqlite3 *database;
    sqlite3_stmt *statement;
    if (sqlite->open(":memory:", &database) != SQLITE_OK)
        return 0;
    snprintf(text, sizeof text,
             "create table t(a integer primary key, b);"
             "with recursive c(x) as (select 1 union all select x + 1 from c where x < %d) "
             "insert into t select x, x * %u from c",
             ROWS, number + 1);
    if (sqlite->exec(database, text, NULL, NULL, NULL) != SQLITE_OK ||
        sqlite->prepare(database, "select sum(b) from t", -1, &statement, NULL) != SQLITE_OK)
        return 0;
    int right = sqlite->step(statement) == SQLITE_ROW &&
                sqlite->column(statement, 0) == (int64_t)ROWS * (ROWS + 1) / 2 * (number + 1);
    return sqlite->finalize(statement) == SQLITE_OK && right;
}

static struct result per_one(struct result sum) {
    double count = sum.made ? sum.made : 1;
    return (struct result){sum.made,          sum.right,           sum.create / count,
                           sum.query / count, sum.new_kib / count, sum.used_kib / count};
}

static struct result by_instances(struct orrery_instance_library *library, unsigned count) {
    struct result sum = {0};
    struct orrery_instance **instances = calloc(count, sizeof *instances);
    struct sqlite sqlite = find_sqlite(find_in_library, library);
    double memory = private_memory("self"), begin = now();
    for (; sum.made < count; sum.made++) {
        instances[sum.made] = orrery_instance_create(library);
        if (!instances[sum.made])
            errx(1, "instance %u: %s", sum.made, orrery_last_error());
    }
    sum.create = now() - begin;
    sum.new_kib = private_memory("self") - memory;
    begin = now();
    for (unsigned i = 0; i < count; i++) {
        if (orrery_instance_enter(instances[i]) != 0)
            errx(1, "instance %u: %s", i, orrery_last_error());
        sum.right += answers_rightly(&sqlite, i);
        orrery_instance_leave(instances[i]);
    }
    sum.query = now() - begin;
    sum.used_kib = private_memory("self") - memory;
    for (unsigned i = 0; i < count; i++) {
        if (orrery_instance_destroy(instances[i]) != 0)
            errx(1, "instance %u: %s", i, orrery_last_error());
    }
    free(instances);
    return per_one(sum);
}

static struct result by_namespaces(const char *path, unsigned count) {
    struct result sum = {0};
    void **handles = calloc(count, sizeof *handles);
    double memory = private_memory("self"), begin = now();
    while (sum.made < count && (handles[sum.made] = dlmopen(LM_ID_NEWLM, path, RTLD_NOW)))
        sum.made++;
    sum.create = now() - begin;
    sum.new_kib = private_memory("self") - memory;
    begin = now();
    for (unsigned i = 0; i < sum.made; i++) {
        struct sqlite sqlite = find_sqlite(dlsym, handles[i]);
        sum.right += answers_rightly(&sqlite, i);
    }
    sum.query = now() - begin;
    sum.used_kib = private_memory("self") - memory;
    for (unsigned i = 0; i < sum.made; i++)
        dlclose(handles[i]);
    free(handles);
    return per_one(sum);
}

/* What a process has answered, in memory that all of them share. */
struct answer {
    int right;
    double time;
};

/* Pipes between the program and all its processes: what each of them writes, and what it waits for. */
struct pipes {
    int ready[2], questions[2], end[2];
};

/* What a process does that has a SQLite: answers when it is asked, and waits for the end. */
static _Noreturn void serve(const struct sqlite *sqlite, unsigned number, const struct pipes *pipes,
                            struct answer *answer) {
    char byte = 0;
    close(pipes->end[1]);
    if (write(pipes->ready[1], &byte, 1) != 1 || read(pipes->questions[0], &byte, 1) != 1)
        _exit(1);
    double begin = now();
    answer->right = answers_rightly(sqlite, number);
    answer->time = now() - begin;
    if (write(pipes->ready[1], &byte, 1) != 1)
        _exit(1);
    _exit(read(pipes->end[0], &byte, 1) != 0);
}

static void wait_for(const struct pipes *pipes, unsigned count) {
    char byte;
    for (unsigned i = 0; i < count; i++) {
        if (read(pipes->ready[0], &byte, 1) != 1)
            err(1, "cannot read what a process writes");
    }
}

static double private_memory_of(const pid_t *processes, unsigned count) {
    double sum = 0;
    for (unsigned i = 0; i < count; i++) {
        char process[16];
        snprintf(process, sizeof process, "%d", processes[i]);
        sum += private_memory(process);
    }
    return sum;
}

static struct result by_processes(const char *path, unsigned count) {
    struct result sum = {0};
    struct pipes pipes;
    pid_t *processes = calloc(count, sizeof *processes);
    struct answer *answers =
        mmap(NULL, count * sizeof *answers, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    void *library = dlopen(path, RTLD_NOW);
    if (!library)
        errx(1, "cannot load %s: %s", path, dlerror());
    if (!processes || answers == MAP_FAILED || pipe(pipes.ready) || pipe(pipes.questions) || pipe(pipes.end))
        err(1, "cannot start processes");
    struct sqlite sqlite = find_sqlite(dlsym, library);
    fflush(NULL);
    double begin = now();
    for (; sum.made < count; sum.made++) {
        processes[sum.made] = fork();
        if (processes[sum.made] == 0)
            serve(&sqlite, sum.made, &pipes, &answers[sum.made]);
        if (processes[sum.made] < 0) {
            warn("process %u", sum.made);
            break;
        }
        wait_for(&pipes, 1);
    }
    sum.create = now() - begin;
    sum.new_kib = private_memory_of(processes, sum.made);
    for (unsigned i = 0; i < sum.made; i++) {
        if (write(pipes.questions[1], "", 1) != 1)
            err(1, "cannot ask process %u", i);
        wait_for(&pipes, 1);
    }
    sum.used_kib = private_memory_of(processes, sum.made);
    close(pipes.end[1]);
    for (unsigned i = 0; i < sum.made; i++) {
        waitpid(processes[i], NULL, 0);
        sum.right += answers[i].right == 1;
        sum.query += answers[i].time;
    }
    free(processes);
    return per_one(sum);
}

static void print(const char *name, struct result result, unsigned count) {
    printf("  %-24s %6u %6u %10.1f %10.1f %10.1f %10.1f\n", name, result.made, result.right, result.create,
           result.new_kib, result.query, result.used_kib);
    if (result.made < count)
        printf("  %-24s there can be no more than these\n", "");
}

int main(int argc, char **argv) {
    char *end = NULL;
    unsigned long count = argc == 4 ? strtoul(argv[3], &end, 10) : 0;
    if (argc != 4 || *end || count < 1 || count > 10000)
        errx(2, "usage: instances LIBRARY PLAIN-LIBRARY COUNT: SQLite built by orrery-cc, the same built by "
                "clang, and "
                "how many of it, 1 to 10000");
    double begin = now();
    struct orrery_instance_library *library = orrery_instance_load(argv[1], NULL);
    if (!library)
        errx(1, "%s", orrery_last_error());
    double load = (now() - begin) / 1e3;
    const struct sqlite sqlite = find_sqlite(find_in_library, library);
    printf("SQLite %s, %lu times: loaded in %.1f ms, %zu bytes of state each\n\n", sqlite.version(), count,
           load, orrery_instance_state_size(library));
    printf("  %-24s %6s %6s %10s %10s %10s %10s\n", "", "made", "right", "us to make", "KiB", "us of work",
           "KiB then");
    struct result result[3] = {by_instances(library, (unsigned)count),
                               by_namespaces(argv[2], (unsigned)count),
                               by_processes(argv[2], (unsigned)count)};
    orrery_instance_close(library);
    print("instances", result[0], (unsigned)count);
    print("dlmopen", result[1], (unsigned)count);
    print("a process each", result[2], (unsigned)count);
    return result[0].right == count && result[2].right == result[2].made ? 0 : 1;
}
