/* System calls of contexts: withheld, trapped, made for another one; descriptors that move. */
#include "check.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <orrery/context.h>

static uint64_t failure(int error) { return (uint64_t)(int64_t)-error; }

static void withheld(void) {
    struct orrery_context_spec none = {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_UNMAP, SYS_uname, 1};
    int caller;
    uint64_t args;
    int new = orrery_context_create(&none, 1, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        struct utsname name;
        for (;;)
            caller = orrery_context_switch(caller, uname(&name) == -1 && errno == EPERM, &args);
    }
    CHECK(orrery_context_switch(new, 0, &args) == new &&args == 1 && orrery_context_trapped_call(NULL) == 0);
    CHECK(orrery_context_close(new) == 0);
}

static void trapped(void) {
    struct orrery_context_spec two[] = {{ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_UNMAP, SYS_openat, 1},
                                        {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_UNMAP, SYS_uname, 1}};
    static char const path[] = "/dev/null";
    int caller;
    uint64_t args;
    int new = orrery_context_create(two, 2, ORRERY_CONTEXT_TRAP_SYSCALLS, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        for (;;) {
            struct utsname name;
            long result = args == 2 ? uname(&name) : syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
            if (args == 2 && result == 0 && strcmp(name.sysname, "Orrery") == 0)
                result = 1234;
            caller = orrery_context_switch(caller, result < 0 ? failure(errno) : (uint64_t)result, &args);
        }
    }
    struct orrery_context_call call;
    char copy[64];
    char byte;
    int64_t number;
    CHECK(orrery_context_switch(new, 0, &args) == new &&args == SYS_openat);
    CHECK(orrery_context_trapped_call(&call) == 1 && call.number == SYS_openat && call.args[2] == O_RDWR);
    CHECK(orrery_context_copy_path(new, call.args[1], copy, sizeof copy) == 0 && strcmp(copy, path) == 0);
    CHECK_ERROR(orrery_context_copy_path(new, call.args[1], copy, 5), EMSGSIZE);
    CHECK_ERROR(orrery_context_copy_path(new, call.args[1], NULL, 5), EMSGSIZE);
    CHECK_ERROR(orrery_context_copy_in(new, 8, &byte, 1), EINVAL);
    CHECK_ERROR(orrery_context_copy_in(new, 8, NULL, 1), EINVAL);
    CHECK_ERROR(orrery_context_overlay(
                    new, &(struct orrery_context_spec){ORRERY_CONTEXT_FD, ORRERY_CONTEXT_COW, 0, 1}, 1),
                EINPROGRESS);
    /* Refused; let go on; performed here, on the copy; given a file of ours. */
    CHECK(orrery_context_switch(new, failure(EROFS), &args) == new &&args == failure(EROFS) &&
          orrery_context_trapped_call(&call) == 0);
    CHECK_ERROR(orrery_context_proceed(new, &args), ENOMSG);
    CHECK_ERROR(orrery_context_install_fd(new, 0), ENOMSG);
    CHECK(orrery_context_switch(new, 0, &args) == new &&orrery_context_proceed(new, &args) == new &&
          (int)args >= 0);
    CHECK(orrery_context_switch(new, 0, &args) == new &&orrery_context_trapped_call(&call) == 1);
    call.args[1] = (uintptr_t)copy;
    CHECK(orrery_context_syscall(
              new, ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_VM) | ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_CRED),
              call.number, call.args, &number) == 0);
    CHECK(number >= 0 &&
          orrery_context_switch(new, (uint64_t)number, &args) == new &&args == (uint64_t)number);
    int file = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    CHECK(orrery_context_switch(new, 0, NULL) == new);
    int there = orrery_context_install_fd(new, file);
    CHECK(there >= 0 && orrery_context_switch(new, (uint64_t)there, &args) == new &&args == (uint64_t)there);
    /* What the call would have written is written for it. */
    CHECK(orrery_context_switch(new, 2, NULL) == new &&orrery_context_trapped_call(&call) == 1 &&
          call.number == SYS_uname);
    CHECK(orrery_context_copy_out(new, call.args[0], "Orrery", 7) == 0);
    CHECK_ERROR(orrery_context_copy_out(new, 8, "x", 1), EINVAL);
    CHECK(orrery_context_switch(new, 0, &args) == new &&args == 1234);
    CHECK(orrery_context_restrict(new, NULL, 0) == 0);
    CHECK_ERROR(orrery_context_copy_in(new, (uintptr_t)path, &byte, 1), EACCES);
    CHECK_ERROR(orrery_context_syscall(new, 0, SYS_getpid, call.args, &number), EACCES);
    CHECK(orrery_context_close(new) == 0);
    close(file);
}

static void for_another(void) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    struct orrery_context_spec rights[] = {
        {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_MAY_ACCESS, (uintptr_t)pipes[1], 1},
        {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_MAY_ACCESS, SYS_getpid, 1}};
    int caller;
    uint64_t args;
    uint64_t none[6] = {0};
    int64_t number;
    int64_t own = getpid();
    int new = orrery_context_create(rights, 2, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        struct orrery_context_spec fetch = {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_COW, (uintptr_t)pipes[1], 1};
        struct orrery_context_spec other = {ORRERY_CONTEXT_FD, ORRERY_CONTEXT_COW, (uintptr_t)pipes[0], 1};
        CHECK(close(pipes[1]) == 0 && write(pipes[1], "x", 1) == -1);
        CHECK(orrery_context_overlay(new, &fetch, 1) == 0);
        CHECK(write(pipes[1], "x", 1) == 1);
        CHECK_ERROR(orrery_context_overlay(new, &other, 1), EACCES);
        CHECK(orrery_context_syscall(new, 0, SYS_getpid, none, &number) == 0 && number == own);
        CHECK_ERROR(orrery_context_syscall(new, 0, SYS_getuid, none, &number), EACCES);
        for (;;)
            caller = orrery_context_switch(caller, (uint64_t)getpid(), &args);
    }
    CHECK(orrery_context_switch(new, 0, &args) == new);
    char byte;
    CHECK(read(pipes[0], &byte, 1) == 1 && byte == 'x');
    CHECK(orrery_context_syscall(new, 0, SYS_getpid, none, &number) == 0 && number == (int64_t)args &&
          number != own);
    CHECK_ERROR(orrery_context_syscall(new, 0, SYS_fork, none, &number), ENOSYS);
    CHECK_ERROR(orrery_context_syscall(new, 1, SYS_getpid, none, &number), EINVAL);
    CHECK_ERROR(orrery_context_syscall(new, 0, SYS_getpid, NULL, &number), EINVAL);
    CHECK_ERROR(orrery_context_syscall(new, 0, -1, none, &number), EINVAL);
    CHECK_ERROR(orrery_context_syscall(0, 0, SYS_getpid, none, &number), EBADF);
    struct orrery_context_spec keep = {ORRERY_CONTEXT_SYSCALL, ORRERY_CONTEXT_COW, SYS_getuid, 1};
    CHECK(orrery_context_restrict(new, &keep, 1) == 0);
    CHECK(orrery_context_syscall(new, 0, SYS_getuid, none, &number) == 0);
    CHECK_ERROR(orrery_context_syscall(new, 0, SYS_getpid, none, &number), EACCES);
    CHECK(orrery_context_close(new) == 0);
}

int main(void) {
    withheld();
    trapped();
    for_another();
    return 0;
}
