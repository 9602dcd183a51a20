/*
 * Orrery: snapshots of the running process, and going back to them.
 *
 *     orrery_rollback_snapshot_t start;
 *     int round = orrery_rollback_snapshot(&start);
 *     if (round < 0)
 *         errx(1, "orrery_rollback_snapshot: %s", orrery_last_error());
 *     if (round < 3) {
 *         work(round);
 *         orrery_rollback_resume(start, round + 1);
 *         errx(1, "orrery_rollback_resume: %s", orrery_last_error());
 *     }
 *
 * Whatever work() does to the process is undone, and orrery_rollback_snapshot returns again, with round + 1.
 *
 * Link with -lorrery. From "Light-Weight Contexts: An OS Abstraction for Safety and Performance" (Litton et
 * al., OSDI 2016), Algorithm 1, on a stock Linux kernel.
 *
 * SNAPSHOTS
 *
 * A snapshot is the whole state of the process at the moment when orrery_rollback_snapshot returns 0. There can be
 * any number of them. They are resumed in any order and as often as one likes; neither resuming nor taking
 * another one uses a snapshot up. A snapshot stays until orrery_rollback_discard. It may be resumed from a deeper
 * stack, from a shallower one, after the function that took it returned (unlike setjmp(3)'s jmp_buf: the stack comes
 * back, too), and from a signal handler.
 *
 * All variables of the program, automatic ones that are in memory or in registers alike, have after a resume
 * the values that they had when the snapshot was taken. There is no exception for modified automatic
 * variables as setjmp(3) has one. What shall outlive a resume is passed by value, or is in memory of its
 * own that orrery_rollback_exclude or MAP_SHARED exempt.
 *
 * WHAT A RESUME UNDOES
 *
 *   - registers, floating-point modes, and the stack;
 *   - all private memory: variables, heap, thread-local storage (errno, too), private mappings of files;
 *   - mappings: new ones are unmapped, lost ones mapped again, protections put back; the program break;
 *   - descriptors: new ones are closed, closed or replaced ones brought back; their flags; offsets of regular
 *     files, save those of the files that standard output and standard error go to: what was written there
 *     stays, and what follows comes behind it;
 *   - signal dispositions, mask, alternate stack; signals that became pending, unless another living process
 *     sent them;
 *   - interval timers (with the time that they had left); POSIX timers made since are deleted;
 *   - working directory, umask, resource limits, niceness, thread name, and a few settings of prctl(2);
 *   - threads started since, which end, and child processes started since, which are killed and reaped, with
 *     all of their descendants.
 *
 * WHAT IT DOES NOT UNDO
 *
 *   - effects outside of the process: files written, created or removed, messages sent, output printed. Note
 *     that stdio's buffers are memory: fflush(3) before taking a snapshot, or each resume brings the unflushed
 *     bytes back;
 *   - data already read from a pipe, socket or terminal: it is gone;
 *   - shared mappings, System V shared memory, and ranges given to orrery_rollback_exclude;
 *   - child processes that ended or were waited for, threads that ended, POSIX timers that were deleted: they
 *     do not come back;
 *   - credentials, namespaces, seccomp filters and whatever else the kernel does not take back.
 *
 * A snapshot keeps the files open that were open when it was taken: while it exists, a pipe's reader sees no
 * end of file though the program closed the writing end.
 *
 * What of the above could not be restored in a particular resume is reported by orrery_last_error after
 * orrery_rollback_snapshot returned. If memory itself cannot be (a mapped file is gone, a thread will not end,
 * memory is used up), there is no state to return to: the process says so on standard error and exits with status 70.
 *
 * THREADS
 *
 * A snapshot is taken while the process has one thread, otherwise orrery_rollback_snapshot fails with EAGAIN: other
 * threads would go on with stacks of another time. Threads that are started afterwards end with the next
 * resume. All calls but orrery_last_error belong to the thread that took the first snapshot.
 *
 * SIGNALS
 *
 * No signal is handled in the midst of a call. A handler may call orrery_rollback_resume whatever it interrupted, be
 * it malloc(3): unlike longjmp(3) out of it, a resume replaces the whole state, half-done work included. It may
 * also take, keep and discard, but no snapshot while it runs on an alternate stack, and not the first one of
 * the process where it may have interrupted malloc(3) or the dynamic linker.
 *
 * Snapshots and longjmp(3) mix: a jmp_buf is valid as long as the frame of its setjmp(3) is there in the
 * present state.
 *
 * FORK
 *
 * A child process has none of its parent's snapshots (ECHILD) and may take its own.
 *
 * COSTS
 *
 * Time goes by the pages written since, some microseconds per call and less than one per page, not by the
 * size of the process. The first snapshot looks at all resident pages (a process of more than 32 MiB is
 * forked instead). A page that is written for the first time after a snapshot or resume costs a fault of
 * about 0.6 us. Snapshots store only the pages in which they differ; a snapshot of a changed descriptor table
 * keeps a sleeping child process, which plain wait(2) does not see. The environment variable ORRERY_TRACKER
 * chooses how written pages are found: wp_async (fast, the default where the kernel has it, Linux 6.7) or
 * compare (any kernel, slow).
 *
 * The C library's _exit is patched in memory when the first snapshot is taken; for programs that only use
 * this header it works as before.
 *
 * ERRORS
 *
 * Calls that fail return -1, set errno, and have changed nothing; orrery_last_error returns a text. Beside those
 * listed at each call:
 *
 *   EPERM     the calling thread is not the one that took the first snapshot
 *   ECHILD    the snapshots belong to another process, of which this one was forked
 *   EBUSY     a rollback (of the Rust interface) is under way; they do not nest
 *   ENOMEM    no memory or address space for the library's records
 */
#ifndef ORRERY_ROLLBACK_H
#define ORRERY_ROLLBACK_H

#include <orrery/error.h>

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The name of a snapshot. No name is given twice in the life of a process, and 0 is none. */
typedef uint64_t orrery_rollback_snapshot_t;

/*
 * Takes a snapshot, stores its name in *id (the snapshot knows it, too), and returns 0. Returns again with
 * the value given to orrery_rollback_resume each time the snapshot is resumed.
 *
 * Errors, beside those above (*id is then as it was):
 *   EINVAL    id is null, or ORRERY_TRACKER names no tracker
 *   EAGAIN    other threads run; or no process may be made (RLIMIT_NPROC)
 *   ENOTSUP   called from a signal handler on an alternate stack; or the process has a shadow stack; or pages
 *             are not of 4096 bytes
 *   ENOSPC    the store of page images cannot grow
 *   others    what a system call of the first snapshot answered: ENOSYS, EMFILE, EPERM (seccomp) ...
 */
int orrery_rollback_snapshot(orrery_rollback_snapshot_t *id) __attribute__((returns_twice));

/*
 * Goes back to the snapshot id, whose orrery_rollback_snapshot returns value. value is none of 0, -1 and INT_MIN,
 * which orrery_rollback_snapshot returns by itself. It returns only if that cannot be.
 *
 * Errors, beside those above:
 *   EINVAL    value is 0 or -1
 *   ENOENT    there is no such snapshot: never taken, or discarded, or no snapshot was taken at all
 */
int orrery_rollback_resume(orrery_rollback_snapshot_t id, int value);

/*
 * Leaves the len bytes at addr alone in every snapshot, earlier ones included, from now on: neither
 * remembered nor restored. For what shall outlive a resume: statistics, caches, results. Whatever lives there
 * must not point into memory that is restored, and its pages must not be malloc's: map them (mmap(2)).
 *
 * Errors, beside those above and those of the first orrery_rollback_snapshot:
 *   EINVAL    addr or len is no multiple of 4096; len is 0; part of the range is not mapped; the stack is in
 *             it
 */
int orrery_rollback_exclude(void *addr, size_t len);

/*
 * Discards a snapshot and releases its memory and files. The present state is not touched.
 *
 * Errors, beside those above:
 *   ENOENT    there is no such snapshot
 */
int orrery_rollback_discard(orrery_rollback_snapshot_t id);

#ifdef __cplusplus
}
#endif

#endif
