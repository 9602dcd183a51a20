/* Constructors by priority, destructors, functions at exit. */
#include <stdio.h>
#include <stdlib.h>

static int order;
__attribute__((constructor(300))) static void second(void) { order = order * 10 + 2; }
__attribute__((constructor(200))) static void first(void) { order = order * 10 + 1; }
__attribute__((constructor)) static void third(void) { order = order * 10 + 3; }
__attribute__((destructor)) static void last(void) { printf("last %d\n", order); }
static void at_exit(void) { printf("exit %d\n", ++order); }

int main(void) {
    atexit(at_exit);
    printf("%d\n", order);
    return 0;
}
