/* longjmp, computed goto, variable arguments, callbacks through the C library. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

static jmp_buf env;
static int depth, compared;
static int order[5] = {3, 1, 2, 5, 4};

static void down(void) {
    if (++depth == 5)
        longjmp(env, depth);
    down();
}
static int compare(const void *a, const void *b) {
    compared++;
    return *(const int *)a - *(const int *)b;
}
static int sum(int n, ...) {
    va_list list;
    va_start(list, n);
    while (n--)
        depth += *va_arg(list, int *);
    va_end(list);
    return depth;
}
static int run(int n) {
    static void *labels[] = {&&zero, &&one, &&two};
    goto *labels[n];
zero:
    depth++;
one:
    depth += 10;
two:
    return depth;
}

int main(void) {
    int got = setjmp(env);
    if (!got)
        down();
    qsort(order, 5, sizeof *order, compare);
    printf("%d %d %d %d %d %d\n", got, order[0], order[4], compared > 3, sum(2, &order[1], &order[2]),
           run(0));
    return 0;
}
