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
    struct lwc_spec specs[] = {
        {LWC_VM, LWC_SHARE, (uintptr_t)memory, PAGE},
        {LWC_VM, LWC_UNMAP, (uintptr_t)memory + 2 * PAGE, PAGE},
        {LWC_VM, LWC_COW | LWC_MAY_ACCESS, (uintptr_t)memory + PAGE, PAGE},
    };
    int caller;
    uint64_t args;
    int new = lwCreate(specs, 3, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        CHECK(caller == new);
        for (;;) {
            char bytes[16] = "";
            size_t length = lwReceived(bytes, sizeof bytes);
            global += (int)args;
            memory[0]++;
            memory[PAGE]++;
            bytes[0] = '<';
            caller = lwSwitchBytes(caller, (uint64_t)global, bytes, length, 0, &args);
            CHECK(caller == new);
        }
    }
    uint64_t result;
    char bytes[16];
    CHECK(lwSwitch(new, 4, &result) == new &&result == 5);
    CHECK(lwReceived(NULL, 0) == 0);
    CHECK(lwSwitchBytes(new, 10, "hello", 5, 1000, &result) == new &&result == 15);
    CHECK(lwReceived(bytes, sizeof bytes) == 5 && memcmp(bytes, "<ello", 5) == 0);
    CHECK(global == 1 && memory[0] == 2 && memory[PAGE] == 0);

    struct lwc_spec copy = {LWC_VM, LWC_COW, (uintptr_t)memory + PAGE, PAGE};
    CHECK(lwOverlay(new, &copy, 1) == 0);
    CHECK(memory[PAGE] == 2);
    struct lwc_spec unmap = {LWC_VM, LWC_UNMAP, (uintptr_t)memory + PAGE, PAGE};
    CHECK(lwOverlay(new, &unmap, 1) == 0);
    CHECK_ERROR(lwOverlay(new, &unmap, 1), EINVAL);
    CHECK(lwRestrict(new, NULL, 0) == 0);
    CHECK_ERROR(lwOverlay(new, &copy, 1), EACCES);

    CHECK(lwClose(new) == 0);
    CHECK_ERROR(lwSwitch(new, 0, NULL), EBADF);
    CHECK_ERROR(lwClose(new), EBADF);
}

static void ends(void) {
    int caller;
    uint64_t args;
    int new = lwCreate(NULL, 0, LWC_SHAREDSIGNALS | LWC_DUMPABLE, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        for (;;) {
            if (args == 1)
                raise(SIGKILL);
            while (args == 2)
                pause();
            caller = lwSwitch(caller, 0, &args);
        }
    }
    CHECK(lwSwitch(new, 0, NULL) == new);
    CHECK(waitpid(-1, NULL, 0) == -1 && errno == ECHILD);
    CHECK_ERROR(lwSwitch(new, 1, NULL), EOWNERDEAD);
    CHECK_ERROR(lwSwitch(new, 0, NULL), ESRCH);
    CHECK(lwClose(new) == 0);

    new = lwCreate(NULL, 0, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1)
        for (;;)
            pause();
    CHECK_ERROR(lwSwitchBytes(new, 2, NULL, 0, 30, NULL), ETIMEDOUT);
    CHECK(lwClose(new) == 0);

    pid_t pid = fork();
    if (pid == 0) {
        new = lwCreate(NULL, 0, 0, &caller, &args);
        if (caller != -1)
            exit(9);
        lwSwitch(new, 0, NULL);
        _exit(1);
    }
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 9);
}

static void is_isolated(void) {
    int caller;
    uint64_t args;
    pid_t root = getpid();
    int new = lwCreate(NULL, 0, LWC_ISOLATED, &caller, &args);
    if (new < 0 && errno == EOPNOTSUPP) {
        fprintf(stderr, "SKIPPED: isolation: %s\n", strerror(errno));
        return;
    }
    CHECK(new >= 0);
    if (caller != -1)
        lwSwitch(caller, kill(root, 0) == -1 ? errno : 0, NULL);
    uint64_t refused;
    CHECK(lwSwitch(new, 0, &refused) == new);
    CHECK(refused == EPERM);
    CHECK(lwClose(new) == 0);
}

static void bad_input(void) {
    char *memory = map(2);
    int caller;
    uint64_t args;
    struct lwc_spec odd[] = {
        {LWC_VM, LWC_SHARE, (uintptr_t)memory + 1, PAGE},
        {LWC_VM, LWC_SHARE, (uintptr_t)memory, 0},
        {LWC_VM, 0, (uintptr_t)memory, PAGE},
        {LWC_VM, LWC_SHARE | LWC_UNMAP, (uintptr_t)memory, PAGE},
        {LWC_FD, LWC_SHARE, 3, 1},
        {9, LWC_COW, 0, PAGE},
        {LWC_SYSCALL, LWC_SHARE, 3, 1},
        {LWC_SYSCALL, LWC_UNMAP, 3, 0},
        {LWC_CRED, LWC_COW, 0, 1},
    };
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        CHECK_ERROR(lwCreate(odd + i, 1, 0, &caller, &args), EINVAL);
    struct lwc_spec twice[] = {{LWC_VM, LWC_SHARE, (uintptr_t)memory, 2 * PAGE},
                               {LWC_VM, LWC_UNMAP, (uintptr_t)memory + PAGE, PAGE}};
    CHECK_ERROR(lwCreate(twice, 2, 0, &caller, &args), EINVAL);
    CHECK_ERROR(lwCreate(NULL, 1, 0, &caller, &args), EINVAL);
    CHECK_ERROR(lwCreate(NULL, 0, 32, &caller, &args), EINVAL);
    CHECK_ERROR(lwCreate(NULL, 0, 0, NULL, &args), EINVAL);
    CHECK_ERROR(lwCreate(NULL, 0, 0, &caller, NULL), EINVAL);
    CHECK_ERROR(lwSwitch(0, 0, NULL), EBADF);
    CHECK_ERROR(lwSwitch(-1, 0, NULL), EBADF);
    CHECK_ERROR(lwSwitchBytes(0, 0, NULL, 1, 0, NULL), EINVAL);
    CHECK_ERROR(lwRestrict(0, odd + 5, 1), EINVAL);
    CHECK_ERROR(lwOverlay(0, odd + 4, 1), EINVAL);
}

int main(void) {
    is_isolated();
    bad_input();
    control_and_memory();
    ends();
    bad_input();
    return 0;
}
