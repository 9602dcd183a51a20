/* A library with state of every kind. */
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

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
