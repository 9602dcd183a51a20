/* A snapshot returns 0, and again with each value that it is resumed with; its name stays. */
#include "check.h"

static const int values[] = {0, 7, -2, 1, 0x7fffffff, -0x7fffffff, 2};
static int global = 1;

int main(void) {
    int local = 1;
    double number = 1.5;
    int *heap = (int *)malloc(sizeof *heap);
    orrery_rollback_snapshot_t start = 0;
    *heap = 1;
    int got = orrery_rollback_snapshot(&start);
    CHECK(got != -1);
    CHECK(start != 0);
    CHECK(global == 1 && local == 1 && *heap == 1 && number == 1.5 && !orrery_last_error());
    global = 2;
    local = 3;
    number = 2.5;
    *heap = 4;
    for (size_t at = 0; at + 1 < sizeof values / sizeof *values; at++) {
        if (values[at] == got) {
            orrery_rollback_resume(start, values[at + 1]);
            CHECK(0);
        }
    }
    CHECK(got == 2 && local == 3 && number == 2.5);
    return 0;
}
