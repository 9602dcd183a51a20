/* A library with a state and a bug: it adds up numbers, and believes the index that a request has. */
#include <stdio.h>
#include <string.h>

long numbers[64];
static long sum;

/* Serves "put INDEX NUMBER" or "sum". Returns the sum of all numbers, or -1 if it is neither. */
long serve(const char *request) {
    long index, number;
    if (sscanf(request, "put %ld %ld", &index, &number) == 2) {
        sum += number - numbers[index];
        numbers[index] = number; /* the bug: anywhere */
        return sum;
    }
    return strcmp(request, "sum") == 0 ? sum : -1;
}

/* Returns whether the sum is that of the numbers. */
int verify(void) {
    long all = 0;
    for (int at = 0; at < 64; at++)
        all += numbers[at];
    return all == sum;
}
