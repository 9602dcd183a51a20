/* A program forks, and its contexts with it. */
#include "check.h"

#include <errno.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <orrery/context.h>

static int wait_for(pid_t child) {
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

int main(void) {
    long *shared = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    struct orrery_context_spec spec = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)shared, 4096};
    pid_t root = getpid();
    int caller;
    uint64_t args;
    int sum = orrery_context_create(&spec, 1, 0, &caller, &args);
    CHECK(sum >= 0);
    if (getpid() != root) {
        uint64_t total = 0;
        for (;;) {
            total += args;
            ++*shared;
            if (args == 13)
                kill(getpid(), SIGKILL);
            CHECK(orrery_context_switch(caller, total, &args) == caller);
        }
    }
    CHECK(orrery_context_switch(sum, 3, &args) == sum && args == 3 && *shared == 1);

    pid_t child = orrery_context_fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(orrery_context_switch(sum, 4, &args) == sum && args == 7 && *shared == 2);
        CHECK(orrery_context_switch(sum, 4, &args) == sum && args == 11 && *shared == 3);
        _exit(5);
    }
    CHECK(wait_for(child) == 5);
    CHECK(orrery_context_switch(sum, 1, &args) == sum && args == 4 && *shared == 2);

    /* Killed, it goes on from what it kept. */
    CHECK(orrery_context_checkpoint(sum) == 0);
    CHECK(orrery_context_switch(sum, 90, &args) == sum && args == 94 && *shared == 3);
    CHECK_ERROR(orrery_context_switch(sum, 13, &args), EOWNERDEAD);
    CHECK(orrery_context_switch(sum, 0, &args) == sum && args == 4 && *shared == 5);
    CHECK_ERROR(orrery_context_checkpoint(-1), EBADF);
    *shared = 2;

    /* The same without being asked for. */
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(orrery_context_switch(sum, 6, &args) == sum && args == 10 && *shared == 3);
        CHECK(orrery_context_close(sum) == 0);
        _exit(6);
    }
    CHECK(wait_for(child) == 6);
    CHECK(orrery_context_switch(sum, 1, &args) == sum && args == 5 && *shared == 3);
    return 0;
}
