/* A program with an orbit that was called three times, until its standard input ends. */
#include <orrery/orbit.h>

#include <stdio.h>
#include <stdlib.h>

static long count(void *argument, void *store) {
    (void)argument;
    (void)store;
    return 1;
}

int main(void) {
    struct orrery_orbit *counter = orrery_orbit_create("counter", count, NULL);

    if (!counter) {
        fprintf(stderr, "%s\n", orrery_last_error());
        return EXIT_FAILURE;
    }
    for (int round = 0; round < 3; round++) {
        if (orrery_orbit_call(counter, 0, NULL, NULL, 0) != 1) {
            fprintf(stderr, "%s\n", orrery_last_error());
            return EXIT_FAILURE;
        }
    }
    puts("called");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    orrery_orbit_destroy(counter);
    return EXIT_SUCCESS;
}
