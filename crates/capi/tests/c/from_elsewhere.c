/* Resuming from a deeper stack, after the function that took the snapshot returned, in the midst of longjmp's
 * business. */
#include <setjmp.h>

#include "check.h"

static orrery_rollback_snapshot_t start;
static jmp_buf outside;

/* The compiler must not merge these frames. */
#define APART __attribute__((noinline))

static APART int take(int argument) {
    volatile int mine = argument * 3;
    int got = orrery_rollback_snapshot(&start);
    CHECK(got >= 0);
    CHECK(mine == argument * 3);
    return got + mine;
}

static APART int take_deeper(int depth) {
    volatile char room[1000];
    room[depth] = (char)depth;
    int got = depth ? take_deeper(depth - 1) : take(7);
    CHECK(room[depth] == (char)depth);
    return got;
}

static APART int scribble(int depth) {
    volatile char room[3000];
    for (size_t i = 0; i < sizeof room; i++)
        room[i] = (char)depth;
    if (depth == 0)
        return room[17];
    return scribble(depth - 1) + room[5];
}

static APART void resume_deeper(int depth, int value) {
    volatile char room[5000];
    room[depth] = 1;
    if (depth)
        resume_deeper(depth - 1, value + 0 * room[depth]);
    else
        orrery_rollback_resume(start, value);
    dprintf(2, "%d: back from a resume with %d: %s\n", depth, value, orrery_last_error());
}

int main(void) {
    int got = take_deeper(20);
    CHECK(got >= 21);
    switch (got - 21) {
    case 0:
        /* Frames of take_deeper are overwritten. */
        (void)scribble(30);
        resume_deeper(100, 1);
        break;
    case 1:
        (void)scribble(3);
        resume_deeper(0, 2);
        break;
    case 2:
        if (setjmp(outside) == 0) {
            (void)scribble(1);
            longjmp(outside, 1);
        }
        /* After a longjmp. */
        resume_deeper(3, 3);
        break;
    default:
        break;
    }
    CHECK(got == 24);

    /* A jmp_buf from before the snapshot is good after a resume, any number of times. */
    static volatile int jumps;
    int jumped = setjmp(outside);
    if (jumped == 0) {
        int again = take_deeper(2) - 21;
        CHECK(again >= 0 && jumps == 0);
        jumps++;
        if (again < 5)
            resume_deeper(again, again + 1);
        longjmp(outside, 9);
    }
    CHECK(jumped == 9 && jumps == 1);
    return 0;
}
