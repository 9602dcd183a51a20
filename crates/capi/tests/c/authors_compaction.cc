/*
 * How the authors' port of LevelDB uses their library: pools made before main(), objects of C++ in them, an orbit that merges
 * tables and writes files, and a reply of two messages: a whole pool, in which the new objects lie, and a scratch whose
 * operations have main copy them. A thread of main's receives, and an operation makes the next call.
 *
 * Built with: -std=c++11 -fno-exceptions -fno-rtti
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <queue>
#include <string>
#include <thread>
#include <vector>

#include <orbit/orbit.h>

#include "check_authors.h"

static const size_t POOL = 64 * 1024 * 1024;
static struct orbit_pool *pool = orbit_pool_create(NULL, POOL);
static struct orbit_pool *reply_pool = orbit_pool_create(NULL, POOL);
static struct orbit_pool *scratch_pool = orbit_pool_create(NULL, POOL);
static struct orbit_allocator *allocator = orbit_allocator_from_pool(pool, true);
static int ready = (orbit::set_global_allocator(allocator), orbit_scratch_set_pool(scratch_pool));

typedef std::basic_string<char, std::char_traits<char>, orbit::global_allocator<char>> Text;

static char folder[] = "/tmp/orrery-compaction-XXXXXX";

static std::string path(long number) { return std::string(folder) + "/" + std::to_string(number); }

static std::vector<long> load(const std::string &name) {
    std::vector<long> keys;
    FILE *file = fopen(name.c_str(), "r");
    CHECK(file);
    for (long key; fscanf(file, "%ld", &key) == 1;)
        keys.push_back(key);
    CHECK(fclose(file) == 0);
    return keys;
}

static void save(const std::string &name, const std::vector<long> &keys) {
    FILE *file = fopen(name.c_str(), "w");
    CHECK(file);
    for (long key : keys)
        fprintf(file, "%ld\n", key);
    CHECK(fclose(file) == 0);
}

struct Table : public orbit::global_new_operator {
    long number;
    Text largest; /* longer than what lies in the string itself */
    Table(long number, long last) : number(number), largest("the largest key of this table is ") {
        largest += std::to_string(last).c_str();
    }
};

struct Version : public orbit::global_new_operator {
    std::vector<Table *, orbit::global_allocator<Table *>> tables;
};

struct Database : public orbit::global_new_operator {
    std::mutex mutex;
    std::condition_variable changed;
    Version *version = new Version;
    long next = 1, compactions = 0, position = 0;
    bool scheduled = false, ending = false;
    Text pointer;
    struct orbit_module *orbit = NULL;
    std::queue<struct orbit_task> *tasks = new std::queue<struct orbit_task>;

    void schedule();
    void flush(std::vector<long> *keys);
    void receive();
    void compact(struct orbit_scratch *scratch);
};

static unsigned long stats(size_t argc, unsigned long argv[]) {
    CHECK(argc == 3 && argv[1] == 1);
    reinterpret_cast<Database *>(argv[0])->compactions += argv[1];
    CHECK(argv[2] == 5);
    return 0;
}

static unsigned long work(void *store, void *argbuf) {
    (void)store;
    CHECK(is_orbit_context());
    Database *database = *static_cast<Database **>(argbuf);
    struct orbit_scratch scratch;
    CHECK(orbit_scratch_create(&scratch) == 0);
    /* From here on new objects lie where main will find them. */
    struct orbit_allocator *reply = orbit_allocator_from_pool(reply_pool, true);
    orbit::set_global_allocator(reply);
    CHECK(orbit_alloc(reply, sizeof(int)));
    database->compact(&scratch);

    database->scheduled = false;
    CHECK(orbit_scratch_push_update(&scratch, &database->scheduled, sizeof database->scheduled) > 0);
    orbit_scratch_run1(&scratch, Database *, database, { database->schedule(); });
    orbit_scratch_run1(&scratch, Database *, database, { database->changed.notify_all(); });

    struct orbit_scratch whole = {reply_pool->data_start, reply_pool->data_length, reply_pool->data_length, 0,
                                  NULL};
    CHECK(orbit_sendv(&whole) == 0);
    CHECK(orbit_sendv(&scratch) == 0);
    return 0;
}

/* In the orbit. */
void Database::compact(struct orbit_scratch *scratch) {
    Database *database = this;
    std::vector<long> keys;
    for (Table *table : version->tables) {
        std::vector<long> some = load(path(table->number));
        keys.insert(keys.end(), some.begin(), some.end());
        CHECK(table->largest == ("the largest key of this table is " + std::to_string(some.back())).c_str());
    }
    std::sort(keys.begin(), keys.end());
    Version *merged = new Version;
    long number = 1000000 + next;
    merged->tables.push_back(new Table(number, keys.back()));
    save(path(number), keys);

    size_t seen = version->tables.size();
    orbit_scratch_run3(scratch, Database *, database, Version *, merged, size_t, seen, {
        /* In main, whose allocator is its own: what the orbit made is copied. */
        Version *installed = new Version;
        for (Table *table : merged->tables)
            installed->tables.push_back(new Table(*table));
        for (size_t index = 0; index < database->version->tables.size(); index++) {
            Table *table = database->version->tables[index];
            if (index >= seen) {
                installed->tables.push_back(table);
                continue;
            }
            CHECK(unlink(path(table->number).c_str()) == 0);
            delete table;
        }
        delete database->version;
        database->version = installed;
    });
    Text *to = &pointer;
    const char *data = merged->tables[0]->largest.data();
    size_t size = merged->tables[0]->largest.size();
    orbit_scratch_run3(scratch, Text *, to, const char *, data, size_t, size, { to->assign(data, size); });
    position += static_cast<long>(keys.size());
    CHECK(orbit_scratch_push_update(scratch, &position, sizeof position) > 0);
    unsigned long argv[] = {reinterpret_cast<unsigned long>(this), 1, 5};
    CHECK(orbit_scratch_push_operation(scratch, stats, 3, argv) > 0);
}

/* With the mutex. */
void Database::schedule() {
    if (scheduled || ending || version->tables.size() < 4)
        return;
    scheduled = true;
    if (!orbit)
        CHECK((orbit = orbit_create("bgcompact", work, NULL)));
    Database *self = this;
    struct orbit_task task;
    CHECK(orbit_call_async(orbit, 0, 1, &pool, NULL, &self, sizeof self, &task) == 0);
    tasks->push(task);
    changed.notify_all();
}

void Database::flush(std::vector<long> *keys) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return version->tables.size() < 12; });
    std::sort(keys->begin(), keys->end());
    save(path(next), *keys);
    version->tables.push_back(new Table(next++, keys->back()));
    keys->clear();
    schedule();
}

void Database::receive() {
    for (;;) {
        struct orbit_task task;
        {
            std::unique_lock<std::mutex> lock(mutex);
            changed.wait(lock, [this] { return ending || !tasks->empty(); });
            if (tasks->empty())
                return;
            task = tasks->front();
            tasks->pop();
        }
        union orbit_result whole, updates, value;
        CHECK(orbit_recvv(&whole, &task) == 1);
        CHECK(whole.scratch.ptr == reply_pool->data_start);
        CHECK(orbit_recvv(&updates, &task) == 1);
        CHECK(orbit_recvv(&value, &task) == 0 && value.retval == 0);
        std::unique_lock<std::mutex> lock(mutex);
        CHECK(orbit_apply(&updates.scratch, false) == ORBIT_END);
    }
}

int main() {
    const long KEYS = 20000;
    CHECK(ready == 0 && mkdtemp(folder));
    Database *database = new Database;
    CHECK(orbit_allocated_by(database, allocator) && orbit_allocated_by(database->version, allocator));
    std::thread receiver([database] { database->receive(); });
    std::vector<long> keys;
    for (long key = 0; key < KEYS; key++) {
        keys.push_back((key * 7919) % KEYS);
        if (keys.size() == 100)
            database->flush(&keys);
    }
    {
        std::unique_lock<std::mutex> lock(database->mutex);
        database->changed.wait(lock, [database] { return !database->scheduled; });
        database->ending = true;
        database->changed.notify_all();
    }
    receiver.join();
    std::vector<long> all;
    for (Table *table : database->version->tables) {
        std::vector<long> some = load(path(table->number));
        all.insert(all.end(), some.begin(), some.end());
        CHECK(table->largest == ("the largest key of this table is " + std::to_string(some.back())).c_str());
        CHECK(unlink(path(table->number).c_str()) == 0);
    }
    std::sort(all.begin(), all.end());
    CHECK(all.size() == static_cast<size_t>(KEYS));
    for (long key = 0; key < KEYS; key++)
        CHECK(all[static_cast<size_t>(key)] == key);
    CHECK(database->compactions >= 10 && database->position > KEYS);
    CHECK(database->pointer.compare(0, 33, "the largest key of this table is ") == 0);
    /* Nothing of the orbit's is left in the directory. */
    CHECK(rmdir(folder) == 0 && orbit_destroy_all() == 0);
    return 0;
}
