/* A library that is built by a plain compiler: state, constructors, thread-local variables, threads, functions that are chosen. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

int counter = 1;
static int *to_counter = &counter;
static int (*operation)(int);
static long table[5000];
static int constructed;
static int *ended;
const char *const names[] = {"none", "one", "two"};
__thread int local = 5;
static __thread int *local_pointer = &counter;
static __thread char zeros[3000] __attribute__((aligned(64)));

__attribute__((constructor)) static void construct(int count, char **arguments, char **environment) {
    constructed += count > 0 && arguments[0] && !arguments[count] && environment;
}
__attribute__((destructor)) static void destruct(void) {
    if (ended)
        *ended = *ended * 10 + 2;
}
static void at_exit(void) { *ended = *ended * 10 + 1; }
int note_end(int *place) {
    ended = place;
    return atexit(at_exit);
}

int next(void) {
    table[4999]++;
    return ++*to_counter;
}
long in_table(void) { return table[4999]; }
int times_constructed(void) { return constructed; }
const char *name(int at) { return names[at]; }
int next_local(void) {
    zeros[2999]++;
    *local_pointer += 1;
    return local++;
}
int local_zeros(void) { return ((unsigned long)zeros % 64) * 1000 + zeros[2999]; }

static int plus(int value) { return value + counter; }
int operate(int value) {
    operation = plus;
    return operation(value);
}
static int compare(const void *one, const void *other) {
    counter++;
    return *(const int *)one - *(const int *)other;
}
int sort(int *values, int count) {
    qsort(values, (size_t)count, sizeof *values, compare);
    return counter;
}

static void (*passed)(int);
void set_passed(void (*function)(int)) { passed = function; }
void pass(int value) {
    counter += 10;
    passed(value);
    counter += 100;
}

static int chosen(void) { return counter + 40; }
static void *choose(void) { return (void *)chosen; }
int indirect(void) __attribute__((ifunc("choose")));
int call_indirect(void) { return indirect(); }
int set_errno(int value) { return errno = value; }

static void *work(void *unused) {
    (void)unused;
    counter += 1000;
    next_local();
    return (void *)(long)local;
}
int run_thread(void) {
    pthread_t thread;
    void *result;
    if (pthread_create(&thread, NULL, work, NULL))
        return -1;
    pthread_join(thread, &result);
    return (int)(long)result;
}
static void *leaves(void *value) { pthread_exit(value); }
int run_exiting_thread(void) {
    pthread_t thread;
    void *result;
    if (pthread_create(&thread, NULL, leaves, &counter))
        return -1;
    pthread_join(thread, &result);
    return result == &counter;
}
static pthread_mutex_t waits = PTHREAD_MUTEX_INITIALIZER;
static pthread_t waiting;
static void *wait(void *of) {
    pthread_mutex_lock(&waits);
    pthread_mutex_unlock(&waits);
    return of;
}
int start_waiting(void) {
    pthread_mutex_lock(&waits);
    return pthread_create(&waiting, NULL, wait, NULL);
}
int end_waiting(void) {
    pthread_mutex_unlock(&waits);
    return pthread_join(waiting, NULL);
}
int overwrite_names(void) {
    *(volatile char **)&names[0] = 0;
    return 0;
}
