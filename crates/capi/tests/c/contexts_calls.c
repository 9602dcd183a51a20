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
    struct lwc_spec none = {LWC_SYSCALL, LWC_UNMAP, SYS_uname, 1};
    int caller;
    uint64_t args;
    int new = lwCreate(&none, 1, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        struct utsname name;
        for (;;)
            caller = lwSwitch(caller, uname(&name) == -1 && errno == EPERM, &args);
    }
    CHECK(lwSwitch(new, 0, &args) == new &&args == 1 && lwCalled(NULL) == 0);
    CHECK(lwClose(new) == 0);
}

static void trapped(void) {
    struct lwc_spec two[] = {{LWC_SYSCALL, LWC_UNMAP, SYS_openat, 1}, {LWC_SYSCALL, LWC_UNMAP, SYS_uname, 1}};
    static char const path[] = "/dev/null";
    int caller;
    uint64_t args;
    int new = lwCreate(two, 2, LWC_SYSTRAP, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        for (;;) {
            struct utsname name;
            long result = args == 2 ? uname(&name) : syscall(SYS_openat, AT_FDCWD, path, O_RDWR);
            if (args == 2 && result == 0 && strcmp(name.sysname, "Orrery") == 0)
                result = 1234;
            caller = lwSwitch(caller, result < 0 ? failure(errno) : (uint64_t)result, &args);
        }
    }
    struct lwc_call call;
    char copy[64];
    char byte;
    int64_t number;
    CHECK(lwSwitch(new, 0, &args) == new &&args == SYS_openat);
    CHECK(lwCalled(&call) == 1 && call.number == SYS_openat && call.args[2] == O_RDWR);
    CHECK(lwCopyPath(new, call.args[1], copy, sizeof copy) == 0 && strcmp(copy, path) == 0);
    CHECK_ERROR(lwCopyPath(new, call.args[1], copy, 5), EMSGSIZE);
    CHECK_ERROR(lwCopyPath(new, call.args[1], NULL, 5), EMSGSIZE);
    CHECK_ERROR(lwCopyIn(new, 8, &byte, 1), EINVAL);
    CHECK_ERROR(lwCopyIn(new, 8, NULL, 1), EINVAL);
    CHECK_ERROR(lwOverlay(new, &(struct lwc_spec){LWC_FD, LWC_COW, 0, 1}, 1), EINPROGRESS);
    /* Refused; let go on; performed here, on the copy; given a file of ours. */
    CHECK(lwSwitch(new, failure(EROFS), &args) == new &&args == failure(EROFS) && lwCalled(&call) == 0);
    CHECK_ERROR(lwProceed(new, &args), ENOMSG);
    CHECK_ERROR(lwGive(new, 0), ENOMSG);
    CHECK(lwSwitch(new, 0, &args) == new &&lwProceed(new, &args) == new && (int)args >= 0);
    CHECK(lwSwitch(new, 0, &args) == new &&lwCalled(&call) == 1);
    call.args[1] = (uintptr_t)copy;
    CHECK(lwSyscall(new, LWC_OWN(LWC_VM) | LWC_OWN(LWC_CRED), call.number, call.args, &number) == 0);
    CHECK(number >= 0 && lwSwitch(new, (uint64_t)number, &args) == new &&args == (uint64_t)number);
    int file = open("/dev/zero", O_RDONLY | O_CLOEXEC);
    CHECK(lwSwitch(new, 0, NULL) == new);
    int there = lwGive(new, file);
    CHECK(there >= 0 && lwSwitch(new, (uint64_t)there, &args) == new &&args == (uint64_t)there);
    /* What the call would have written is written for it. */
    CHECK(lwSwitch(new, 2, NULL) == new &&lwCalled(&call) == 1 && call.number == SYS_uname);
    CHECK(lwCopyOut(new, call.args[0], "Orrery", 7) == 0);
    CHECK_ERROR(lwCopyOut(new, 8, "x", 1), EINVAL);
    CHECK(lwSwitch(new, 0, &args) == new &&args == 1234);
    CHECK(lwRestrict(new, NULL, 0) == 0);
    CHECK_ERROR(lwCopyIn(new, (uintptr_t)path, &byte, 1), EACCES);
    CHECK_ERROR(lwSyscall(new, 0, SYS_getpid, call.args, &number), EACCES);
    CHECK(lwClose(new) == 0);
    close(file);
}

static void for_another(void) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    struct lwc_spec rights[] = {{LWC_FD, LWC_MAY_ACCESS, (uintptr_t)pipes[1], 1},
                                {LWC_SYSCALL, LWC_MAY_ACCESS, SYS_getpid, 1}};
    int caller;
    uint64_t args;
    uint64_t none[6] = {0};
    int64_t number;
    int64_t own = getpid();
    int new = lwCreate(rights, 2, 0, &caller, &args);
    CHECK(new >= 0);
    if (caller != -1) {
        struct lwc_spec fetch = {LWC_FD, LWC_COW, (uintptr_t)pipes[1], 1};
        struct lwc_spec other = {LWC_FD, LWC_COW, (uintptr_t)pipes[0], 1};
        CHECK(close(pipes[1]) == 0 && write(pipes[1], "x", 1) == -1);
        CHECK(lwOverlay(new, &fetch, 1) == 0);
        CHECK(write(pipes[1], "x", 1) == 1);
        CHECK_ERROR(lwOverlay(new, &other, 1), EACCES);
        CHECK(lwSyscall(new, 0, SYS_getpid, none, &number) == 0 && number == own);
        CHECK_ERROR(lwSyscall(new, 0, SYS_getuid, none, &number), EACCES);
        for (;;)
            caller = lwSwitch(caller, (uint64_t)getpid(), &args);
    }
    CHECK(lwSwitch(new, 0, &args) == new);
    char byte;
    CHECK(read(pipes[0], &byte, 1) == 1 && byte == 'x');
    CHECK(lwSyscall(new, 0, SYS_getpid, none, &number) == 0 && number == (int64_t)args && number != own);
    CHECK_ERROR(lwSyscall(new, 0, SYS_fork, none, &number), ENOSYS);
    CHECK_ERROR(lwSyscall(new, 1, SYS_getpid, none, &number), EINVAL);
    CHECK_ERROR(lwSyscall(new, 0, SYS_getpid, NULL, &number), EINVAL);
    CHECK_ERROR(lwSyscall(new, 0, -1, none, &number), EINVAL);
    CHECK_ERROR(lwSyscall(0, 0, SYS_getpid, none, &number), EBADF);
    struct lwc_spec keep = {LWC_SYSCALL, LWC_COW, SYS_getuid, 1};
    CHECK(lwRestrict(new, &keep, 1) == 0);
    CHECK(lwSyscall(new, 0, SYS_getuid, none, &number) == 0);
    CHECK_ERROR(lwSyscall(new, 0, SYS_getpid, none, &number), EACCES);
    CHECK(lwClose(new) == 0);
}

int main(void) {
    withheld();
    trapped();
    for_another();
    return 0;
}
