/* Contexts: two returns, arguments, sharing, overlays, ends. */
#include "check.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <orrery/context.h>

#define PAGE 4096

static int global = 1;

static char *map(size_t pages) {
    char *start = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(start != MAP_FAILED);
    return start;
}

static void control_and_memory(void) {
    char *memory = map(3);
    struct orrery_context_spec specs[] = {
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)memory, PAGE},
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_UNMAP, (uintptr_t)memory + 2 * PAGE, PAGE},
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_COW | ORRERY_CONTEXT_MAY_ACCESS, (uintptr_t)memory + PAGE, PAGE},
    };
    int caller;
    uint64_t args;
    int new = orrery_context_create(specs, 3, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        CHECK(caller == new);
        for (;;) {
            char bytes[16] = "";
            size_t length = orrery_context_received(bytes, sizeof bytes);
            global += (int)args;
            memory[0]++;
            memory[PAGE]++;
            bytes[0] = '<';
            caller = orrery_context_switch_bytes(caller, (uint64_t)global, bytes, length, 0, &args);
            CHECK(caller == new);
        }
    }
    uint64_t result;
    char bytes[16];
    CHECK(orrery_context_switch(new, 4, &result) == new &&result == 5);
    CHECK(orrery_context_received(NULL, 0) == 0);
    CHECK(orrery_context_switch_bytes(new, 10, "hello", 5, 1000, &result) == new &&result == 15);
    CHECK(orrery_context_received(bytes, sizeof bytes) == 5 && memcmp(bytes, "<ello", 5) == 0);
    CHECK(global == 1 && memory[0] == 2 && memory[PAGE] == 0);

    struct orrery_context_spec copy = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_COW, (uintptr_t)memory + PAGE, PAGE};
    CHECK(orrery_context_overlay(new, &copy, 1) == 0);
    CHECK(memory[PAGE] == 2);
    struct orrery_context_spec unmap = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_UNMAP, (uintptr_t)memory + PAGE,
                                        PAGE};
    CHECK(orrery_context_overlay(new, &unmap, 1) == 0);
    CHECK_ERROR(orrery_context_overlay(new, &unmap, 1), EINVAL);
    CHECK(orrery_context_restrict(new, NULL, 0) == 0);
    CHECK_ERROR(orrery_context_overlay(new, &copy, 1), EACCES);

    CHECK(orrery_context_close(new) == 0);
    CHECK_ERROR(orrery_context_switch(new, 0, NULL), EBADF);
    CHECK_ERROR(orrery_context_close(new), EBADF);
}

static void ends(void) {
    int caller;
    uint64_t args;
    int new = orrery_context_create(NULL, 0, ORRERY_CONTEXT_SHARED_SIGNALS | ORRERY_CONTEXT_DUMPABLE, &caller,
                                    &args);
    CHECK(new >= 0);
    if (caller != -1) {
        for (;;) {
            if (args == 1)
                raise(SIGKILL);
            while (args == 2)
                pause();
            caller = orrery_context_switch(caller, 0, &args);
        }
    }
    CHECK(orrery_context_switch(new, 0, NULL) == new);
    CHECK(waitpid(-1, NULL, 0) == -1 && errno == ECHILD);
    CHECK_ERROR(orrery_context_switch(new, 1, NULL), EOWNERDEAD);
    CHECK_ERROR(orrery_context_switch(new, 0, NULL), ESRCH);
    CHECK(orrery_context_close(new) == 0);

    new = orrery_context_create(NULL, 0, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;)
            pause();
    CHECK_ERROR(orrery_context_switch_bytes(new, 2, NULL, 0, 30, NULL), ETIMEDOUT);
    CHECK(orrery_context_close(new) == 0);

    pid_t pid = fork();
    if (pid == 0) {
        new = orrery_context_create(NULL, 0, 0, &caller, &args);
        if (caller != -1)
            exit(9);
        orrery_context_switch(new, 0, NULL);
        _exit(1);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 9);
}

/* What a context with these options gets when it signals the root: 0, or an errno. */
static uint64_t signals_the_root(unsigned options) {
    int caller;
    uint64_t args;
    pid_t root = getpid();
    int new = orrery_context_create(NULL, 0, options, &caller, &args);
    if (new < 0)
        return errno;
    if (caller != -1)
        orrery_context_switch(caller, kill(root, 0) == -1 ? errno : 0, NULL);
    uint64_t refused;
    CHECK(orrery_context_switch(new, 0, &refused) == new);
    CHECK(orrery_context_close(new) == 0);
    return refused;
}

static void is_isolated(void) {
    CHECK(signals_the_root(ORRERY_CONTEXT_NOT_ISOLATED) == 0);
    uint64_t refused = signals_the_root(0);
    if (refused == EOPNOTSUPP) {
        fprintf(stderr, "SKIPPED: isolation: %s\n", strerror(EOPNOTSUPP));
        return;
    }
    CHECK(refused == EPERM);
    CHECK(signals_the_root(ORRERY_CONTEXT_ISOLATED) == EPERM);
}

static void bad_input(void) {
    char *memory = map(2);
    int caller;
    uint64_t args;
    struct orrery_context_spec odd[] = {
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)memory + 1, PAGE},
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)memory, 0},
        {ORRERY_CONTEXT_VM, 0, (uintptr_t)memory, PAGE},
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE | ORRERY_CONTEXT_UNMAP, (uintptr_t)memory, PAGE},
        {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_SHARE, 3, 1},
        {9, ORRERY_CONTEXT_COW, 0, PAGE},
        {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_SHARE, 3, 1},
        {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_UNMAP, 3, 0},
        {ORRERY_CONTEXT_CRED, ORRERY_CONTEXT_COW, 0, 1},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        CHECK_ERROR(orrery_context_create(odd + i, 1, 0, &caller, &args), EINVAL);
    struct orrery_context_spec twice[] = {
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)memory, 2 * PAGE},
        {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_UNMAP, (uintptr_t)memory + PAGE, PAGE}};
    CHECK_ERROR(orrery_context_create(twice, 2, 0, &caller, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(NULL, 1, 0, &caller, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(NULL, 0, 64, &caller, &args), EINVAL);
    unsigned both = ORRERY_CONTEXT_ISOLATED | ORRERY_CONTEXT_NOT_ISOLATED;
    CHECK_ERROR(orrery_context_create(NULL, 0, both, &caller, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(NULL, 0, 0, NULL, &args), EINVAL);
    CHECK_ERROR(orrery_context_create(NULL, 0, 0, &caller, NULL), EINVAL);
    CHECK_ERROR(orrery_context_switch(0, 0, NULL), EBADF);
    CHECK_ERROR(orrery_context_switch(-1, 0, NULL), EBADF);
    CHECK_ERROR(orrery_context_switch_bytes(0, 0, NULL, 1, 0, NULL), EINVAL);
    CHECK_ERROR(orrery_context_restrict(0, odd + 5, 1), EINVAL);
    CHECK_ERROR(orrery_context_overlay(0, odd + 4, 1), EINVAL);
}

int main(void) {
    is_isolated();
    bad_input();
    control_and_memory();
    ends();
    bad_input();
    return 0;
}
