/* A tree of 64 snapshots with random writes between them, against plain copies. */
#include <sys/mman.h>

#include "check.h"

enum { SNAPSHOTS = 64, PAGES = 96, PAGE = 4096, STEPS = 700 };

/* What survives: the model. */
struct model {
    orrery_rollback_snapshot_t ids[SNAPSHOTS];
    unsigned long long random;
    int steps, live[SNAPSHOTS], present;
    unsigned char copies[SNAPSHOTS][PAGES * PAGE];
    unsigned char now[PAGES * PAGE];
};

static struct model *model;
static unsigned char *memory;

static unsigned draw(unsigned below) {
    model->random = model->random * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(model->random >> 33) % below;
}

/* The same to memory and to the copy of what it should be. */
static void write_somewhere(void) {
    unsigned writes = draw(12);
    while (writes--) {
        unsigned at = draw(PAGES * PAGE), length = 1 + draw(draw(8) ? 64 : 5 * PAGE);
        if (length > PAGES * PAGE - at)
            length = PAGES * PAGE - at;
        int byte = draw(4) ? (int)draw(256) : 0;
        memset(memory + at, byte, length);
        memset(model->now + at, byte, length);
    }
    if (draw(3) == 0) {
        unsigned page = draw(PAGES), pages = 1 + draw(PAGES - page);
        CHECK(madvise(memory + page * PAGE, pages * PAGE, MADV_DONTNEED) == 0);
        memset(model->now + page * PAGE, 0, pages * PAGE);
    }
}

int main(void) {
    size_t size = (sizeof *model + PAGE - 1) / PAGE * PAGE;
    model = (struct model *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(model != MAP_FAILED && orrery_rollback_exclude(model, size) == 0);
    memory =
        (unsigned char *)mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    model->random = 20161102;
    while (model->steps++ < STEPS) {
        CHECK(memcmp(memory, model->now, PAGES * PAGE) == 0);
        write_somewhere();
        int place = (int)draw(SNAPSHOTS);
        if (!model->live[place]) {
            model->live[place] = 1;
            memcpy(model->copies[place], model->now, PAGES * PAGE);
            int got = orrery_rollback_snapshot(&model->ids[place]);
            CHECK(got >= 0 && !orrery_last_error());
            if (got > 0) {
                /* place is the one of the snapshot, since it lives on the stack. */
                CHECK(got == place + 1);
                memcpy(model->now, model->copies[place], PAGES * PAGE);
            }
        } else if (draw(12) == 0) {
            model->live[place] = 0;
            CHECK(orrery_rollback_discard(model->ids[place]) == 0);
        } else {
            orrery_rollback_resume(model->ids[place], place + 1);
            CHECK(0);
        }
    }
    return 0;
}
