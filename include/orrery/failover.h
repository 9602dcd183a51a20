/*
 * Orrery: what becomes of a system call that the kernel's death interrupts.
 *
 *     static long sent_or_not(const struct orrery_failover_call *call)
 *     {
 *         return already_there(call) ? call->arguments[2] : orrery_failover_retry(call);
 *     }
 *     ...
 *     orrery_failover_set_result(SYS_fallocate, ORRERY_FAILOVER_RETRY);
 *     orrery_failover_set_result(SYS_rename, -EIO);
 *     orrery_failover_set_handler(SYS_sendto, sent_or_not);
 *
 * Link with -lorthros, or start an unmodified program with LD_PRELOAD=liborthros.so, and set the results in the
 * environment: ORTHROS_CALLS=fallocate=again,rename=EIO. Without that variable, write, writev, pwrite64, pwritev,
 * sendto, sendmsg, open, openat and connect are begun again: they happen at least once.
 *
 * A service that `orrery orthros` runs goes on after its kernel has died. A system call that was under way then is
 * not under way any more, and whether it had an effect, nobody knows. Without this library, calls that had only been
 * waiting, and such as may be made twice, are begun again; all others fail with EINTR. The book has the table.
 *
 * While the kernel lives, the library does nothing and costs nothing. After "Orthros: A High-Reliability Operating
 * System with Transmigration of Processes" (Yoshida et al., PRDC 2013), section IV-E-2.
 */
#ifndef ORRERY_FAILOVER_H
#define ORRERY_FAILOVER_H

#ifdef __cplusplus
extern "C" {
#endif

/* Leaves a call to the rescue. */
#define ORRERY_FAILOVER_DEFAULT 0
/* Makes it again. */
#define ORRERY_FAILOVER_RETRY 1

/* A call as it was made. */
struct orrery_failover_call {
    long number;
    long arguments[6];
};

/*
 * Settles a call, in the thread that made it, where it made it: gives what the kernel would have, an error as its
 * negative number. It may do what a signal handler may.
 */
typedef long (*orrery_failover_handler)(const struct orrery_failover_call *call);

/*
 * Sets the result of an interrupted call (SYS_*): ORRERY_FAILOVER_DEFAULT, ORRERY_FAILOVER_RETRY, or an error's
 * negative number to fail with it. Returns 0, or -1 with errno EINVAL if there is no such call or result; then
 * nothing has changed. It may be called from any thread at any time.
 */
int orrery_failover_set_result(long call, int answer);

/* Lets a function settle a call; NULL leaves it to the rescue. Returns 0, or -1 with errno EINVAL if there is no
 * such call. */
int orrery_failover_set_handler(long call, orrery_failover_handler handler);

/* Makes a call again, for handlers. Returns what the kernel does, an error as its negative number. */
long orrery_failover_retry(const struct orrery_failover_call *call);

#ifdef __cplusplus
}
#endif

#endif
