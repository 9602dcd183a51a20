/* The auditor's reader of libraries, for the fuzz target `auditor_library`. The rest of the file is not linked. */
#include "../../crates/orc/auditor/c/place.c"

/* Whether the first bytes of a file are those of a library that is worth a place, and what of it is known then. */
int fuzz_library(int fd, uint64_t size, uint64_t known[4]) {
    struct library library = {0};
    int is_worth = examine(fd, size, &library);
    known[0] = library.length;
    known[1] = library.alignment;
    known[2] = library.relocated;
    known[3] = library.relocated_length;
    return is_worth;
}
