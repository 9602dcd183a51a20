/* The library of program.c. */
#include <stdlib.h>

int counter = 1;
static char *block;
int next(void) { return counter++; }
char *grow(size_t size) { return block = realloc(block, size); }
