/* Every function of allocation that is redirected. */
#define _GNU_SOURCE
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *(*volatile by_pointer)(size_t) = malloc;
static void (*const release)(void *) = free;

int main(void) {
    char *a = by_pointer(100), *b = calloc(10, 10), *c = strdup("copied"), *d = strndup("cut off", 3),
         *e = NULL;
    strcpy(a, "begin");
    a = realloc(a, 100000);
    b = reallocarray(b, 100, 10);
    printf("%s %d %s %s\n", a, b[99], c, d);
    void *aligned = NULL, *other = aligned_alloc(256, 512);
    int failed = posix_memalign(&aligned, 4096, 10);
    printf("%d %d %d %d\n", failed, (int)((uintptr_t)aligned % 4096), (int)((uintptr_t)other % 256),
           malloc_usable_size(aligned) >= 10);
    printf("%d\n", posix_memalign(&aligned + 0, 3, 10));
    void *volatile none = calloc(SIZE_MAX / 2, 4);
    printf("%d\n", none == NULL);
    size_t room = 0;
    FILE *file = tmpfile();
    fputs("one\na longer line, which needs more room\n", file);
    rewind(file);
    while (getline(&e, &room, file) > 0)
        printf("%s", e);
    if (asprintf(&a, "%d", 42) > 0)
        puts(a);
    fclose(file);
    for (void **at = (void *[]){a, b, c, d, e, aligned, other, NULL}; *at; at++)
        release(*at);
    return 0;
}
