/* A library with state of every kind. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>

int counter = 1;
static int *const to_counter = &counter;
static int values[100] = {1, 2, 3};
int *past = values + 100;
static char zeros[5000];
__attribute__((cls_shared)) int everybody;
static __thread int local = 5;
static __thread int *local_pointer = &values[1];
static int constructed;
static int (*callback)(int);
static char *text;
static jmp_buf env;
static void (*ended)(int);

__attribute__((constructor)) static void construct(void) { constructed += 1; }

int next(void) {
    *to_counter += 1;
    everybody++;
    zeros[4999]++;
    return counter;
}
int get(int at) { return values[at]; }
void set(int at, int value) { values[at] = value; }
long past_distance(void) { return past - values; }
int times_constructed(void) { return constructed; }
int next_local(void) {
    *local_pointer += 1;
    return local++;
}
void set_callback(int (*function)(int)) { callback = function; }
int call_back(int n) {
    int before = counter;
    int result = callback(n);
    return result + counter - before;
}
const char *append(const char *more) {
    size_t length = text ? strlen(text) : 0;
    text = realloc(text, length + strlen(more) + 1);
    if (text)
        strcpy(text + length, more);
    return text;
}
void *allocate(size_t size) { return malloc(size); }
void release(void *memory) { free(memory); }
static void *work(void *of) {
    for (int i = 0; i < 1000; i++)
        (*to_counter)++;
    next_local();
    return of;
}
int run_thread(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, NULL))
        return -1;
    pthread_join(thread, NULL);
    return counter;
}
static void *calls_back(void *of) {
    callback(counter);
    return of;
}
int run_callback_in_thread(void) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, calls_back, NULL))
        return -1;
    return pthread_join(thread, NULL);
}
static pthread_mutex_t waits = PTHREAD_MUTEX_INITIALIZER;
static void *wait(void *of) {
    pthread_mutex_lock(&waits);
    pthread_mutex_unlock(&waits);
    return of;
}
static pthread_t waiting;
int start_waiting(void) {
    pthread_mutex_lock(&waits);
    return pthread_create(&waiting, NULL, wait, NULL);
}
void end_waiting(void) {
    pthread_mutex_unlock(&waits);
    pthread_join(waiting, NULL);
}
int jump_within(int n) {
    int got = setjmp(env);
    if (!got)
        longjmp(env, n);
    return got + counter;
}
static void at_exit(void) { ended(counter); }
void note_end(void (*function)(int)) {
    ended = function;
    atexit(at_exit);
}

static pthread_key_t keys[8];
static int ends;
/* The thread's variables are there still, also where another key's destructor ran before. */
static void value_ends(void *value) {
    ends += *(int *)value + 100 * local;
    free(value);
}
int make_keys(void) {
    int failed = 0;
    for (int i = 0; i < 8; i++)
        failed |= i % 2 ? tss_create(&keys[i], value_ends) != thrd_success
                        : pthread_key_create(&keys[i], value_ends);
    return failed;
}
int set_values(void) {
    for (int i = 0; i < 8; i++) {
        int *value = malloc(sizeof *value);
        if (!value)
            return -1;
        *value = counter + i;
        if (i % 2 ? tss_set(keys[i], value) != thrd_success : pthread_setspecific(keys[i], value))
            return -1;
    }
    return 0;
}
int sum_values(void) {
    int sum = 0;
    for (int i = 0; i < 8; i++) {
        int *value = i % 2 ? tss_get(keys[i]) : pthread_getspecific(keys[i]);
        sum += value ? *value : 1000;
    }
    return sum;
}
int sum_of_ends(void) { return ends; }
static void *works_with_values(void *of) {
    next_local();
    return set_values() ? NULL : of;
}
int run_thread_with_values(void) {
    pthread_t thread;
    void *result = NULL;
    if (pthread_create(&thread, NULL, works_with_values, &ends) || pthread_join(thread, &result))
        return -1;
    return result ? ends : -1;
}
int delete_keys(void) {
    int deleted = 0;
    for (int i = 0; i < 8; i++) {
        pthread_key_delete(keys[i]);
        deleted += pthread_setspecific(keys[i], &ends) != 0 && pthread_getspecific(keys[i]) == NULL;
    }
    return deleted;
}
int most_keys(void) {
    pthread_key_t key;
    int made = 0;
    while (pthread_key_create(&key, NULL) == 0)
        made++;
    return made;
}

/* A key of the process, as another library would make it: its destructor runs after that of the runtime. */
static pthread_key_t outer;
static int seen;
static void outer_ends(void *of) { *(int *)of = 1000 * local + counter; }
static void *works_with_outer(void *of) {
    int (*set)(pthread_key_t, const void *) = dlsym(RTLD_DEFAULT, "pthread_setspecific");
    next_local();
    return set(outer, &seen) ? NULL : of;
}
int run_thread_with_process_key(void) {
    int (*make)(pthread_key_t *, void (*)(void *)) = dlsym(RTLD_DEFAULT, "pthread_key_create");
    int (*end)(pthread_key_t) = dlsym(RTLD_DEFAULT, "pthread_key_delete");
    pthread_t thread;
    seen = 0;
    if (make(&outer, outer_ends) || pthread_create(&thread, NULL, works_with_outer, &seen) ||
        pthread_join(thread, NULL) || end(outer))
        return -1;
    return seen;
}
