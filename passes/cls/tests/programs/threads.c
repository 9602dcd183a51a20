/* Thread-local variables and threads. */
#include <pthread.h>
#include <stdio.h>

static int target = 5;
__thread int local = 1;
static __thread int *pointer = &target;
static _Thread_local char zero[3000];
extern __thread int local;

static void *work(void *of) {
    local += *(int *)of;
    zero[2999]++;
    *pointer += local;
    return (void *)(long)(local * 10 + zero[2999]);
}

int main(void) {
    long sum = 0;
    for (int i = 0; i < 4; i++) {
        pthread_t thread;
        void *result;
        pthread_create(&thread, NULL, work, &i);
        pthread_join(thread, &result);
        sum += (long)result;
    }
    local += 2;
    printf("%ld %d %d\n", sum, local, target);
    return 0;
}
