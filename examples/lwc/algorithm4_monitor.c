/*
 * A reference monitor: Algorithm 4 of "Light-Weight Contexts" (OSDI 2016).
 *
 *     cc -Iinclude examples/lwc/algorithm4_monitor.c -Ltarget/release -lorrery -o algorithm4
 *     printf '/proc/version\n/etc/shadow\n' | LD_LIBRARY_PATH=target/release ./algorithm4
 *
 * Each line of standard input is a file that untrusted code asks for. The monitor lets it have /dev/null
 * and /proc/version, by looking at its own copy of the name and opening that copy itself.
 */
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <orrery/context.h>
#include <orrery/rollback.h>

/* What the untrusted code must not get a copy of. */
static char secret[4096] __attribute__((aligned(4096))) = "the monitor's secret";

static int is_allowed(int child, struct orrery_context_call *call, char *path, size_t room) {
    if (call->number != SYS_openat || (int)call->args[0] != AT_FDCWD)
        return 0;
    if (orrery_context_copy_path(child, call->args[1], path, room) < 0)
        return 0;
    call->args[1] = (uintptr_t)path; /* from here on it is the copy that counts */
    return strcmp(path, "/dev/null") == 0 || strcmp(path, "/proc/version") == 0;
}

static _Noreturn void monitor(int child) {
    char path[4096];
    struct orrery_context_call call;
    if (orrery_context_switch(child, 0, NULL) < 0)
        errx(1, "orrery_context_switch: %s", orrery_last_error());
    for (;;) {
        int64_t out = -EPERM;
        if (!orrery_context_trapped_call(&call))
            errx(1, "the child switched here without a call");
        if (is_allowed(child, &call, path, sizeof path)) {
            /* The memory and the credentials are ours, the file will be the child's. */
            unsigned mask =
                ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_VM) | ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_CRED);
            if (orrery_context_syscall(child, mask, call.number, call.args, &out) < 0)
                errx(1, "orrery_context_syscall: %s", orrery_last_error());
        }
        if (orrery_context_switch(child, (uint64_t)out, NULL) < 0)
            errx(1, "orrery_context_switch: %s", orrery_last_error());
    }
}

/* In the child: opens whatever it is told to. An exit ends the program. */
static int run(void) {
    char line[256];
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        int file = open(line, O_RDONLY);
        printf("%s: %s\n", line, file < 0 ? strerror(errno) : "open");
        if (file >= 0)
            close(file);
    }
    return fflush(stdout);
}

int main(void) {
    /* All but private data, and no name of a file, a process or a socket. */
    struct orrery_context_spec specs = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_UNMAP, (uintptr_t)secret,
                                        sizeof secret};
    int caller;
    uint64_t args;
    int child = orrery_context_create(&specs, 1, ORRERY_CONTEXT_TRAP_SYSCALLS, &caller, &args);
    if (child < 0)
        errx(1, "orrery_context_create: %s", orrery_last_error());
    if (caller == -1)
        monitor(child);
    return run();
}
