/* Names of contexts: the root's, copies; a table of descriptors and credentials that two share. */
#include "check.h"

#include <fcntl.h>
#include <sys/syscall.h>

#include <orrery/context.h>

/* Answers each call with what it was told, and one more. */
static void answer(int caller, uint64_t args) {
    for (;;) {
        caller = orrery_context_switch(caller, args + 1, &args);
        CHECK(caller >= 0);
    }
}

static int answering(const struct orrery_context_spec *specs, size_t count) {
    int caller;
    uint64_t args;
    int new = orrery_context_create(specs, count, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        answer(caller, args);
    return new;
}

/* A context of a context knows the root, and is not the root's own. */
static void the_root(void) {
    int caller;
    uint64_t args;
    int outer = orrery_context_create(NULL, 0, 0, &caller, &args);
    CHECK(outer >= 0);
    if (caller != -1) {
        int inner = orrery_context_create(NULL, 0, 0, &caller, &args);
        if (caller != -1) {
            CHECK(orrery_context_switch(ORRERY_CONTEXT_ROOT, 5, &args) == ORRERY_CONTEXT_ROOT && args == 6);
            orrery_context_switch(ORRERY_CONTEXT_ROOT, 7, NULL);
        }
        orrery_context_switch(inner, 0, NULL);
    }
    int from = orrery_context_switch(outer, 0, &args);
    CHECK(from >= 0 && from != outer && args == 5);
    CHECK(orrery_context_switch(from, 6, &args) == from && args == 7);
    CHECK_ERROR(orrery_context_switch(ORRERY_CONTEXT_ROOT, 0, &args), EDEADLK);
    CHECK_ERROR(orrery_context_restrict(ORRERY_CONTEXT_ROOT, NULL, 0), EDEADLK);
    CHECK(orrery_context_close(from) == 0 && orrery_context_close(outer) == 0);
}

static void copies(void) {
    uint64_t args;
    int one = answering(NULL, 0);
    int copy = dup(one);
    CHECK(copy >= 0 && orrery_context_switch(copy, 3, &args) == copy && args == 4);
    CHECK(orrery_context_close(one) == 0);
    CHECK_ERROR(orrery_context_switch(one, 3, &args), EBADF);
    CHECK(orrery_context_switch(copy, 5, &args) >= 0 && args == 6);
    CHECK(orrery_context_close(copy) == 0);
}

static void a_table(void) {
    struct orrery_context_spec all = {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_SHARE, 0, ORRERY_CONTEXT_ALL};
    int caller, table = -1;
    uint64_t args;
    int new = orrery_context_create(&all, 1, ORRERY_CONTEXT_DUMPABLE, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;) {
            int file = args ? close((int)args) : open("/dev/null", O_RDONLY);
            caller = orrery_context_switch_bytes(caller, (uint64_t)file, &(pid_t){getpid()}, sizeof(pid_t), 0,
                                                 &args);
        }
    CHECK(orrery_context_switch(new, 0, &args) == new);
    pid_t pid;
    CHECK(orrery_context_received(&pid, sizeof pid) == sizeof pid);
    table = (int)args;
    CHECK(fcntl(table, F_GETFD) != -1);
    CHECK(syscall(SYS_kcmp, getpid(), pid, 2 /* KCMP_FILES */, 0, 0) == 0);
    CHECK(orrery_context_switch(new, (uint64_t)table, &args) == new &&args == 0);
    CHECK(fcntl(table, F_GETFD) == -1 && errno == EBADF);
    CHECK(orrery_context_close(new) == 0);

    struct orrery_context_spec odd[][2] = {
        {{ORRERY_CONTEXT_FD, ORRERY_CONTEXT_SHARE, 3, 5}, {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_COW, 0, 3}},
        {all, {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_UNMAP, 3, 5}},
        {{ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_SHARE, 0, ORRERY_CONTEXT_ALL}, all},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        CHECK_ERROR(orrery_context_create(odd[i], 2, 0, &caller, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(&all, 1, ORRERY_CONTEXT_TRAP_SYSCALLS, &caller, &args), EINVAL);
}

/* Whom it becomes, its creator becomes. */
static void credentials(void) {
    struct orrery_context_spec all = {ORRERY_CONTEXT_CRED, ORRERY_CONTEXT_SHARE, 0, ORRERY_CONTEXT_ALL};
    int caller;
    uint64_t args;
    int new = orrery_context_create(&all, 1, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;)
            caller = orrery_context_switch(caller, (uint64_t)seteuid((uid_t)args), &args);
    uid_t own = geteuid(), other = own ? own : 65534;
    CHECK(orrery_context_switch(new, other, &args) == new &&args == 0 && geteuid() == other);
    CHECK(orrery_context_switch(new, own, &args) == new &&args == 0 && geteuid() == own);
    CHECK(orrery_context_close(new) == 0);
    struct orrery_context_spec part = {ORRERY_CONTEXT_CRED, ORRERY_CONTEXT_SHARE, 0, 1},
                               gone = {ORRERY_CONTEXT_CRED, ORRERY_CONTEXT_UNMAP, 0, ORRERY_CONTEXT_ALL};
    CHECK_ERROR(orrery_context_create(&part, 1, 0, &caller, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(&gone, 1, 0, &caller, &args), EINVAL);
}

int main(void) {
    CHECK_ERROR(orrery_context_switch(ORRERY_CONTEXT_ROOT, 0, NULL), EBADF);
    the_root();
    copies();
    a_table();
    credentials();
    return 0;
}
