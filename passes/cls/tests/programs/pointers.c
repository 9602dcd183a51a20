/* Constants that point to state, to a fixpoint; addresses in expressions, phis, vectors and aggregates. */
#include <stdio.h>
#include <string.h>

int values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
static int *const middle = &values[4];
int *const *const through = &middle;
static const struct entry {
    const char *name;
    int *value;
    const struct entry *next;
} table[] = {{"first", &values[0], &table[1]}, {"last", &values[7], 0}};
static int *writable = &values[2];
int *past = values + 8;
static const long number = 42;

static int add(int a, int b) { return a + b; }
static int (*const operation)(int, int) = add;
static int (*choice)(int, int) = add;

int *pick(int which) {
    switch (which) {
    case 0:
        return &values[0];
    case 1:
        return &values[1];
    case 2:
        return writable;
    default:
        return middle;
    }
}

typedef long vector __attribute__((vector_size(16)));
vector addresses(void) { return (vector){(long)&values[0], (long)&values[1]}; }

struct pair {
    int *one, *two;
};
struct pair pairs(int swap) {
    struct pair there = {&values[0], &values[7]}, back = {&values[7], &values[0]};
    return swap ? back : there;
}

int main(int argc, char **argv) {
    (void)argv;
    int sum = 0;
    for (const struct entry *e = table; e; e = e->next) {
        *e->value += 10;
        sum += *e->value;
        printf("%s ", e->name);
    }
    **through = 50;
    writable++;
    for (int i = 0; i < 4; i++)
        sum += *pick(i * argc);
    vector v = addresses();
    printf("%d %d %d %ld %ld %ld\n", sum, operation(1, 2), choice(3, 4), number, (long)(past - values),
           (v[1] - v[0]));
    struct pair p = pairs(argc > 1);
    printf("%d %d %d\n", *p.one, *p.two, memcmp(&p.one, &(int *){&values[0]}, sizeof(int *)));
    return 0;
}
