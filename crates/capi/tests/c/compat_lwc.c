/* The Algorithms of the paper on light-weight contexts, by the paper's own names. */
#include "check.h"

#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <orrery/compat/lwc.h>

/* Algorithm 1: a snapshot of the process to which it goes back after each request. */
static void snapshot_and_rollback(void) {
    int served = 0, *rounds;
    rounds = (int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(rounds != MAP_FAILED);
    CHECK(lw_keep(rounds, 4096) == 0);
    lw_snapshot_t start;
    int round = lw_snapshot(&start);
    CHECK(round >= 0 && round == *rounds);
    CHECK(served++ == 0);
    if (++*rounds < 3) {
        lw_resume(start, *rounds);
        CHECK(!"lw_resume returned");
    }
    CHECK(*rounds == 3 && lw_discard(start) == 0);
}

/* Algorithm 3: a context that shows its parent nothing but answers. */
static void sensitive_data(void) {
    int caller, value;
    uint64_t args, result;
    static uint64_t key;
    struct lwc_spec nothing = {LWC_VM, LWC_COW, 0, LWC_ALL};
    int child = lwCreate(&nothing, 1, LWC_ALONE, &caller, &args);
    CHECK(child >= 0);
    if (caller != -1) {
        key = 7;
        for (;;)
            caller = lwSwitch(caller, args * key, &args);
    }
    value = lwSwitch(child, 6, &result);
    CHECK(value == child && result == 42 && key == 0);
    CHECK(lwRestrict(child, NULL, 0) == 0);
    uintptr_t page = (uintptr_t)&key & ~(uintptr_t)4095;
    struct lwc_spec overlay = {LWC_VM, LWC_COW, page, 4096};
    CHECK(lwOverlay(child, &overlay, 1) == -1 && errno == EACCES && lw_error());
    CHECK(lwSwitch(child, 3, &result) == child && result == 21);
    CHECK(lwClose(child) == 0);
}

/* Algorithm 4: the parent decides its child's system calls, and answers them. */
static void reference_monitor(void) {
    struct lwc_spec decided = {LWC_SYSCALL, LWC_UNMAP, SYS_uname, 1};
    int caller;
    uint64_t args;
    int child = lwCreate(&decided, 1, LWC_SYSTRAP, &caller, &args);
    CHECK(child >= 0);
    if (caller != -1) {
        struct utsname name;
        long result = uname(&name);
        uint64_t renamed = result == 0 && strcmp(name.sysname, "Orrery") == 0;
        for (;;)
            caller = lwSwitch(caller, renamed, &args);
    }
    struct lwc_call call;
    CHECK(lwSwitch(child, 0, NULL) == child);
    CHECK(lwCalled(&call) == 1 && call.number == SYS_uname);
    CHECK(lwCopyOut(child, call.args[0], "Orrery", 7) == 0);
    CHECK(lwSwitch(child, 0, &args) == child && lwCalled(&call) == 0 && args == 1);
    CHECK(lwClose(child) == 0);
}

int main(void) {
    snapshot_and_rollback();
    sensitive_data();
    reference_monitor();
    return 0;
}
