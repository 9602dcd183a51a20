/* Kept memory survives every resume, also that of snapshots from before it was kept. */
#include <sys/mman.h>

#include "check.h"

int main(void) {
    const size_t page = 4096;
    char *memory = (char *)mmap(NULL, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    static char data[3 * 4096] __attribute__((aligned(4096)));
    CHECK(memory != MAP_FAILED);
    memset(memory, 'a', 8 * page);
    memset(data, 'a', sizeof data);
    orrery_rollback_snapshot_t early, late;
    int got = orrery_rollback_snapshot(&early);
    CHECK(got >= 0);
    for (size_t at = 0; at < 8; at++) {
        int is_kept = at == 2 || at == 3;
        CHECK(memory[at * page] == (got && is_kept ? 'b' + got - 1 : 'a'));
    }
    CHECK(data[0] == 'a' && data[page] == (got ? 'b' + got - 1 : 'a') && data[2 * page] == 'a');
    if (got == 0) {
        CHECK(orrery_rollback_exclude(memory + 2 * page, 2 * page) == 0);
        CHECK(orrery_rollback_exclude(data + page, page) == 0);
        /* Twice is as good as once. */
        CHECK(orrery_rollback_exclude(memory + 2 * page, page) == 0);
    }
    if (got < 3) {
        memset(memory, 'b' + got, 8 * page);
        memset(data, 'b' + got, sizeof data);
        orrery_rollback_resume(early, got + 1);
        CHECK(0);
    }
    memset(memory, 'm', 8 * page);
    got = orrery_rollback_snapshot(&late);
    CHECK(got >= 0);
    CHECK(memory[0] == 'm' && memory[2 * page] == (got ? 'z' : 'm') && memory[4 * page] == 'm');
    memset(memory, 'z', 8 * page);
    if (got == 0) {
        orrery_rollback_resume(late, 1);
        CHECK(0);
    }
    return 0;
}
