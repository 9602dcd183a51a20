/* The library of mapped.c, for which a plain compiler is enough. */
#include <pthread.h>

#ifdef __cplusplus
extern "C" {
#endif

extern int counter;
int counter = 1;
static __thread int local = 5;
static int *ended;

int next(void) { return counter++; }
int next_local(void) { return local++; }
void note_end(int *place) { ended = place; }
__attribute__((destructor)) static void destruct(void) {
    if (ended)
        ++*ended;
}

static pthread_mutex_t waits = PTHREAD_MUTEX_INITIALIZER;
static pthread_t waiting;
static void *wait_here(void *of) {
    pthread_mutex_lock(&waits);
    pthread_mutex_unlock(&waits);
    return of;
}
int start_waiting(void) {
    pthread_mutex_lock(&waits);
    return pthread_create(&waiting, 0, wait_here, 0);
}
int end_waiting(void) {
    pthread_mutex_unlock(&waits);
    return pthread_join(waiting, 0);
}

#ifdef __cplusplus
}
#endif
