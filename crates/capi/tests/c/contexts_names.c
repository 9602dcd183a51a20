/* Names of contexts: the root's, copies; a table of descriptors and credentials that two share. */
#include "check.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include <orrery/context.h>

/* Answers each call with what it was told, and one more. */
static void answer(int caller, uint64_t args) {
    for (;;) {
        caller = lwSwitch(caller, args + 1, &args);
        CHECK(caller >= 0);
    }
}

static int answering(const struct lwc_spec *specs, size_t count) {
    int caller;
    uint64_t args;
    int new = lwCreate(specs, count, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        answer(caller, args);
    return new;
}

/* A context of a context knows the root, and is not the root's own. */
static void the_root(void) {
    int caller;
    uint64_t args;
    int outer = lwCreate(NULL, 0, 0, &caller, &args);
    CHECK(outer >= 0);
    if (caller != -1) {
        int inner = lwCreate(NULL, 0, 0, &caller, &args);
        if (caller != -1) {
            CHECK(lwSwitch(LWC_ROOT, 5, &args) == LWC_ROOT && args == 6);
            lwSwitch(LWC_ROOT, 7, NULL);
        }
        lwSwitch(inner, 0, NULL);
    }
    int from = lwSwitch(outer, 0, &args);
    CHECK(from >= 0 && from != outer && args == 5);
    CHECK(lwSwitch(from, 6, &args) == from && args == 7);
    CHECK_ERROR(lwSwitch(LWC_ROOT, 0, &args), EDEADLK);
    CHECK_ERROR(lwRestrict(LWC_ROOT, NULL, 0), EDEADLK);
    CHECK(lwClose(from) == 0 && lwClose(outer) == 0);
}

static void copies(void) {
    uint64_t args;
    int one = answering(NULL, 0);
    int copy = dup(one);
    CHECK(copy >= 0 && lwSwitch(copy, 3, &args) == copy && args == 4);
    CHECK(lwClose(one) == 0);
    CHECK_ERROR(lwSwitch(one, 3, &args), EBADF);
    CHECK(lwSwitch(copy, 5, &args) >= 0 && args == 6);
    CHECK(lwClose(copy) == 0);
}

static void a_table(void) {
    struct lwc_spec all = {LWC_FD, LWC_SHARE, 0, LWC_ALL};
    int caller, table = -1;
    uint64_t args;
    int new = lwCreate(&all, 1, LWC_DUMPABLE, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;) {
            int file = args ? close((int)args) : open("/dev/null", O_RDONLY);
            caller = lwSwitchBytes(caller, (uint64_t)file, &(pid_t){getpid()}, sizeof(pid_t), 0, &args);
        }
    CHECK(lwSwitch(new, 0, &args) == new);
    pid_t pid;
    CHECK(lwReceived(&pid, sizeof pid) == sizeof pid);
    table = (int)args;
    CHECK(fcntl(table, F_GETFD) != -1);
    CHECK(syscall(SYS_kcmp, getpid(), pid, 2 /* KCMP_FILES */, 0, 0) == 0);
    CHECK(lwSwitch(new, (uint64_t)table, &args) == new &&args == 0);
    CHECK(fcntl(table, F_GETFD) == -1 && errno == EBADF);
    CHECK(lwClose(new) == 0);

    struct lwc_spec odd[][2] = {
        {{LWC_FD, LWC_SHARE, 3, 5}, {LWC_FD, LWC_COW, 0, 3}},
        {all, {LWC_FD, LWC_UNMAP, 3, 5}},
        {{LWC_SYSCALL, LWC_SHARE, 0, LWC_ALL}, all},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        CHECK_ERROR(lwCreate(odd[i], 2, 0, &caller, &args), EINVAL);
    CHECK_ERROR(lwCreate(&all, 1, LWC_SYSTRAP, &caller, &args), EINVAL);
}

/* Whom it becomes, its creator becomes. */
static void credentials(void) {
    struct lwc_spec all = {LWC_CRED, LWC_SHARE, 0, LWC_ALL};
    int caller;
    uint64_t args;
    int new = lwCreate(&all, 1, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;)
            caller = lwSwitch(caller, (uint64_t)seteuid((uid_t)args), &args);
    uid_t own = geteuid(), other = own ? own : 65534;
    CHECK(lwSwitch(new, other, &args) == new &&args == 0 && geteuid() == other);
    CHECK(lwSwitch(new, own, &args) == new &&args == 0 && geteuid() == own);
    CHECK(lwClose(new) == 0);
    struct lwc_spec part = {LWC_CRED, LWC_SHARE, 0, 1}, gone = {LWC_CRED, LWC_UNMAP, 0, LWC_ALL};
    CHECK_ERROR(lwCreate(&part, 1, 0, &caller, &args), EINVAL);
    CHECK_ERROR(lwCreate(&gone, 1, 0, &caller, &args), EINVAL);
}

int main(void) {
    CHECK_ERROR(lwSwitch(LWC_ROOT, 0, NULL), EBADF);
    the_root();
    copies();
    a_table();
    credentials();
    return 0;
}
