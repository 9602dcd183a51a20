/*
 * Orrery: what a program that runs under an executive can ask for.
 *
 *     static volatile sig_atomic_t quality = 3;
 *
 *     static void on_upcall(int64_t number, int64_t value, void *user)
 *     {
 *         (void)user;
 *         if (number == 1)
 *             quality = (sig_atomic_t)value;
 *     }
 *
 *     if (orrery_upcall_register(NULL, on_upcall, NULL) != 0)
 *         warnx("%s", orrery_last_error());
 *
 * The program runs without Orrery as well: then the call fails with ENOTSUP.
 *
 * Link with -lorrery. From "Hijack: Taking Control of COTS Systems to Enforce Predictable Service Guarantees"
 * (West and Parmer), whose kernels call into the running program.
 *
 * UPCALLS
 *
 * A program that was started by `orrery run --manager SOCKET` or `orrery run --extension MANIFEST` registers one
 * function. An extension of the service manager has a handle
 *
 *     notify = { to = "upcall", of = "player", rights = ["emit"] }
 *
 * and emits 4 bytes of number and 8 of value to it: the function of the program named "player" is called with both.
 * They come from the manager alone. Up to 64 upcalls wait; what finds no room is dropped and counted.
 *
 * The function is called in the thread that registered it, whatever that is doing, on a stack of its own with a guard
 * page below. It is like a signal handler with SA_RESTART, of a signal that the program does not have:
 *
 *   - It calls async-signal-safe functions alone (signal-safety(7)), and reads and writes what such a handler may.
 *     errno is restored after it. Further upcalls wait until it ends; signals do not.
 *   - It returns, or leaves for good by siglongjmp(3) with a saved mask. After longjmp(3), or siglongjmp(3) without one,
 *     no further upcall comes until the thread sets its mask. It does not throw.
 *   - Calls that it interrupts are made again, save those that no flag of sigaction(2) restarts and that fail with EINTR:
 *     poll, select, epoll_wait, pause, sigsuspend, sigwaitinfo, sleeps, and the others that signal(7) lists.
 *   - If it crashes, the program does, by the signal that a handler would have crashed it with.
 *
 * From the first registration on, the signal SIGRTMAX (64) is the executive's, for the life of the process: sigaction(2)
 * fails with EINVAL, waiting for it and blocking it are no-ops, and one that somebody sends is discarded. A thread that blocks
 * all signals (sigfillset(3)) has no upcall until it unblocks one: C libraries do that where no handler may run. Other
 * sets do not keep upcalls away.
 *
 * ENDS
 *
 *   - A child of fork(2) has no function registered, and is no program that the manager knows.
 *   - execve(2) ends the registration. No upcall meant for the old program reaches the new one.
 *   - The thread ends: the registration does, too. Another thread may register then.
 *   - The program installs a system-call filter: the registration ends, since the executive makes no call any more that the
 *     program does not make. Registering fails with EPERM from then on.
 *   - The manager ends: what it sent is delivered, and nothing comes any more. The program registers again, after
 *     orrery_upcall_unregister, with the next manager.
 *
 * ERRORS
 *
 * Calls that fail return -1, set errno, and have changed nothing; orrery_last_error (orrery/error.h) returns a text.
 */
#ifndef ORRERY_HIJACK_H
#define ORRERY_HIJACK_H

#include <orrery/error.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a function is registered. 0 and null pointers stand for the defaults. */
struct orrery_upcall_options {
    /* The size of the structure, in bytes. */
    size_t size;
    /* The manager's socket. Default: $ORRERY_MANAGER, which `orrery run --manager` sets, or the user's manager. */
    const char *manager;
    /* The length of the function's stack, in bytes: 32 KiB to 1 GiB. Default: 64 KiB. */
    size_t stack_size;
};

#define ORRERY_UPCALL_OPTIONS_INIT                                                                           \
    { sizeof(struct orrery_upcall_options), NULL, 0 }

/* A function for upcalls: the number and the value that an extension emitted, and the pointer it was registered with. */
typedef void (*orrery_upcall_function)(int64_t number, int64_t value, void *user);

/*
 * Registers a function, which is called in this thread from now on, before the call returns at the earliest. options may be a null pointer.
 *
 * Errors:
 *   EINVAL    function is null; stack_size is out of its range; the size of options is not set
 *   E2BIG     options has members that this version does not know
 *   ENOTSUP   there is no executive beneath the program
 *   EBUSY     a function is registered, and its thread runs
 *   EPERM     the program has installed a system-call filter
 *   EACCES    the manager refuses: the process has not joined it
 *   EPROTO    the manager is of another version
 *   others    what a system call answered: ECONNREFUSED, ENOENT (no manager listens at the socket), ENOMEM ...
 */
int orrery_upcall_register(const struct orrery_upcall_options *options, orrery_upcall_function function,
                           void *user);

/*
 * Ends the registration: the function is not called any more. Called by the thread that registered it, in the function itself
 * as well; by another one once that thread has ended. It is async-signal-safe.
 *
 * Errors:
 *   ENOENT    no function is registered
 *   EPERM     another thread registered it
 *   EBUSY     it was called from a function or handler that interrupted orrery_upcall_register
 */
int orrery_upcall_unregister(void);

/* Returns how many upcalls found no room since the function was registered. */
uint64_t orrery_upcall_dropped(void);

#ifdef __cplusplus
}
#endif

#endif
