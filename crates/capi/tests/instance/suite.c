/* Runs the main function of a library's tests in each of many instances, which all exist: suite LIBRARY COUNT [ARGUMENT...]. */

#include "all_instances.h"

int main(int argc, char **argv) {
    if (argc < 3) {
        fprintf(stderr, "usage: suite LIBRARY COUNT [ARGUMENT...]\n");
        return 2;
    }
    const struct all_instances all = create_all(argv[1], "suite_main", argv[2]);
    size_t failed = 0;
    for (size_t at = 0; at < all.count; at++) {
        enter(all, at);
        const int result = all.function(argc - 2, argv + 2);
        leave(all, at);
        if (result != 0) {
            fprintf(stderr, "instance %zu: status %d\n", at, result);
            failed++;
        }
    }
    destroy_all(all);
    fprintf(stderr, "%zu instances, %zu failed\n", all.count, failed);
    return failed != 0;
}
