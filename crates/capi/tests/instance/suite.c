/* Runs the main function of a library's tests in each of many instances, which all exist from the beginning:

       suite LIBRARY COUNT kept|destroyed [ARGUMENT...]

   What ran in one is kept until all have run, or is destroyed before the next one runs. */

#include "all_instances.h"
#include <stdbool.h>

int main(int argc, char **argv) {
    const bool destroyed = argc > 3 && strcmp(argv[3], "destroyed") == 0;
    if (argc < 4 || (!destroyed && strcmp(argv[3], "kept") != 0)) {
        fprintf(stderr, "usage: suite LIBRARY COUNT kept|destroyed [ARGUMENT...]\n");
        return 2;
    }
    const struct all_instances all = create_all(argv[1], "suite_main", argv[2]);
    size_t failed = 0;
    for (size_t at = 0; at < all.count; at++) {
        enter(all, at);
        const int result = all.function(argc - 3, argv + 3);
        leave(all, at);
        if (destroyed)
            destroy(all, at);
        if (result != 0) {
            fprintf(stderr, "instance %zu: status %d\n", at, result);
            failed++;
        }
    }
    destroy_all(all);
    fprintf(stderr, "%zu instances, %zu failed\n", all.count, failed);
    return failed != 0;
}
