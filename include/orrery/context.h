/*
 * Orrery: contexts of the running program, each with memory, descriptors and credentials of its own, into
 * which its thread steps and back.
 *
 *     int caller;
 *     uint64_t args;
 *     int new = orrery_context_create(NULL, 0, 0, &caller, &args);
 *     if (new < 0)
 *         err(1, "orrery_context_create: %s", orrery_last_error());
 *     if (caller != -1)                       // the new context, switched to for the first time
 *         for (;;)
 *             caller = orrery_context_switch(caller, args * 2, &args);
 *     orrery_context_switch(new, 21, &args);               // the creator: args is 42
 *
 * Link with -lorrery. From "Light-Weight Contexts: An OS Abstraction for Safety and Performance" (Litton et
 * al., OSDI 2016), sections 3.1 to 3.9, on a stock Linux kernel. orrery_last_error (orrery/error.h) returns a text.
 *
 * CONTEXTS
 *
 * orrery_context_create copies the calling context as fork(2) copies a process: memory (copy-on-write), descriptors,
 * credentials. The copy does not run until somebody switches to it; then orrery_context_create returns there, too. A
 * thread is in one context at a time: whoever calls orrery_context_switch stops there until control comes back, from
 * whichever context. Arguments are a number, and up to ORRERY_CONTEXT_MESSAGE_MAX bytes
 * (orrery_context_switch_bytes, orrery_context_received). The only ways into a context are returns of
 * orrery_context_create and orrery_context_switch, and its signal handlers.
 *
 * Underneath, each context is a process; the program's own one, the root, is the parent of all. wait(2) does
 * not see them. They end when the root ends, however that may be. An exit in any context ends the program
 * with its status. A context that is killed, or dies of a fault, is an error of the switch that waits for it.
 *
 * DESCRIPTORS
 *
 * A context is named by a descriptor. It ends when the last context that holds one closes it, unless it has
 * control. A new context holds one of its creator; whoever is switched to holds one of its caller. Close them
 * with orrery_context_close, which also lets go of what the library keeps; close(2) ends contexts just the same.
 * Copies (dup(2)) and what came over a socket of your own (SCM_RIGHTS in unix(7)) name the same context, with the
 * same rights; a process forked by fork(2) holds copies, too. The root is ORRERY_CONTEXT_ROOT in every context.
 *
 * THREADS
 *
 * Each thread switches for itself, and has registers, stack and thread-local storage of its own in each context.
 * Several may be in one context. The threads that the creator has exist in the new context, too: what they were
 * doing at its creation they go on with there when they first switch there (a switch that they were parked in
 * returns). A lock that one of them held then is held there: bring threads to a consistent point before. They
 * are held still for the moment of the copy; calls that signals interrupt fail with EINTR.
 *
 * RIGHTS
 *
 * A creator may overlay its own memory with any of its context's (orrery_context_overlay); a context with what of its
 * creator's the specification marked ORRERY_CONTEXT_MAY_ACCESS; so with descriptors, and with system calls that are
 * made for another context (orrery_context_syscall). orrery_context_restrict narrows what a descriptor allows, at
 * once, for all who hold it, for good. The owner of the memory checks. A context is closed to debuggers and other
 * processes of its user (PR_SET_DUMPABLE in prctl(2)), unless ORRERY_CONTEXT_DUMPABLE; the superuser can look into
 * it. Nor does it reach processes outside, the root for instance, unless ORRERY_CONTEXT_NOT_ISOLATED.
 *
 * SYSTEM CALLS
 *
 * A context may not make the system calls that were marked ORRERY_CONTEXT_UNMAP: they fail with EPERM. With
 * ORRERY_CONTEXT_TRAP_SYSCALLS they arrive in its creator, whose orrery_context_switch returns;
 * orrery_context_trapped_call returns the call. The creator looks at what the arguments point to
 * (orrery_context_copy_in, orrery_context_copy_path: once, for it may change), may make the call itself
 * (orrery_context_syscall) or put a descriptor there (orrery_context_install_fd), and answers by switching back with
 * what the call returns: -4095 to -1 are errors.
 *
 * SIGNALS
 *
 * What the kernel raises for something that a context did (SIGSEGV, SIGFPE, SIGPIPE ...) it gets. Others go to
 * the root at once, even while another context has control, and to contexts with ORRERY_CONTEXT_SHARED_SIGNALS: at
 * once what is sent to the process group, when control next comes there what is sent to the program. A program that
 * is stopped (Ctrl-Z, SIGSTOP) is stopped whichever context has control, and continued likewise.
 *
 * ERRORS
 *
 * Calls that fail return -1 and set errno. Beside those listed at each call:
 *
 *   EBUSY     a signal handler interrupted another call about contexts
 *   EPERM     the calling thread does not exist in that context: it began after that was created, or was not
 *             taken along (ORRERY_CONTEXT_SINGLE_THREAD)
 *   EAGAIN    more than 256 threads use contexts
 *   ECHILD    contexts belong to another process, of which this one was forked, and could not be copied
 *   EBADF     the descriptor names no context here
 *   EDEADLK   the descriptor names the calling context itself
 *   ESRCH     the context has ended before
 *   EINVAL    a range is empty, not made of pages of 4096 bytes, given twice, or of memory that cannot be
 *             shared: the stack, unmapped, not readable and writable
 *   ETIMEDOUT    the context is stopped by a signal and did not answer (orrery_context_overlay,
 *                orrery_context_restrict, orrery_context_syscall)
 *   EINPROGRESS  the context is stopped in a system call that its creator must answer first
 *   others    what a system call answered: EMFILE, ENOMEM, EAGAIN (RLIMIT_NPROC) ...
 */
#ifndef ORRERY_CONTEXT_H
#define ORRERY_CONTEXT_H

#include <orrery/error.h>

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a specification is about. */
#define ORRERY_CONTEXT_VM 1      /* memory: addresses and bytes, whole pages */
#define ORRERY_CONTEXT_FD 2      /* descriptors: the first one, and how many */
#define ORRERY_CONTEXT_SYSCALL 3 /* system calls: the first number (SYS_...), and how many */
#define ORRERY_CONTEXT_CRED                                                                                  \
    4 /* credentials: all of them (0, ORRERY_CONTEXT_ALL); and in the mask of orrery_context_syscall */

/* What becomes of it. */
#define ORRERY_CONTEXT_COW                                                                                   \
    0x1 /* orrery_context_create: a copy, as without a specification; orrery_context_overlay: a copy */
/* memory: one and the same in both contexts, at the same address; descriptors, all of them (0, ORRERY_CONTEXT_ALL):
 * one table, in which both find what either opens, including names of contexts with all rights; credentials:
 * who either becomes, the other is when control next comes there */
#define ORRERY_CONTEXT_SHARE 0x2
#define ORRERY_CONTEXT_UNMAP                                                                                 \
    0x4 /* orrery_context_create: not in the new context; orrery_context_overlay: remove the overlay */
#define ORRERY_CONTEXT_MAY_ACCESS                                                                            \
    0x8 /* orrery_context_create: the new context may overlay it or have it called; with another or alone */
#define ORRERY_CONTEXT_MAY_ACCESS 0x8 /* the same by the paper's other name */

/* A length: all there is from `start` on. */
#define ORRERY_CONTEXT_ALL ((size_t)-1)

/* The descriptor of the root, in every context. It carries no rights. */
#define ORRERY_CONTEXT_ROOT 1000

struct orrery_context_spec {
    int type;
    unsigned how;
    uintptr_t start;
    size_t length;
};

/* Options of orrery_context_create. */
#define ORRERY_CONTEXT_SHARED_SIGNALS 0x1 /* gets signals that no context caused, if its creator does */
#define ORRERY_CONTEXT_DUMPABLE 0x2       /* is as open to debuggers as its creator */
/* Calls that it may not make arrive in its creator; without any ORRERY_CONTEXT_SYSCALL, those that name files,
 * processes and sockets: about what FreeBSD's capability mode takes away. */
#define ORRERY_CONTEXT_TRAP_SYSCALLS 0x4
/* No thread but the calling one may ever switch there, and the others are not held still. */
#define ORRERY_CONTEXT_SINGLE_THREAD 0x8
/*
 * Contexts are isolated: they can neither signal nor trace processes that are not their own or started by them, their
 * creator and the root included, nor change how these run: limits, CPUs, scheduling and priorities (prlimit,
 * sched_setaffinity, setpriority, ioprio_set and the like fail with EPERM, unless they name the caller). It takes
 * Landlock's scopes (Linux 6.12): without them orrery_context_create fails with EOPNOTSUPP. Contexts that the root
 * creates are each isolated; what these create shares their domain. With ORRERY_CONTEXT_ISOLATED it has a domain of its
 * own in any case, of which the kernel nests 16; with ORRERY_CONTEXT_NOT_ISOLATED it is as its creator is.
 */
#define ORRERY_CONTEXT_ISOLATED 0x10
#define ORRERY_CONTEXT_NOT_ISOLATED 0x20

/* How many bytes a switch carries. */
#define ORRERY_CONTEXT_MESSAGE_MAX 65536

/*
 * Creates a context. Returns its descriptor in the creator, where *caller is -1. Returns again in the new
 * context when somebody first switches to it: the descriptor of its creator, with that of the caller in
 * *caller and its argument in *args. Memory marked ORRERY_CONTEXT_SHARE must not be malloc's.
 *
 * Errors, beside those above:
 *   EINVAL    caller or args is null; a type, how or option is unknown; ORRERY_CONTEXT_SHARE of a part of the
 *             descriptors or credentials, of all descriptors together with ORRERY_CONTEXT_UNMAP of some or with
 *             ORRERY_CONTEXT_TRAP_SYSCALLS, or of system calls
 *   ENOSPC    there are 4096 contexts
 *   EFAULT    the new context died of what was unmapped
 */
int orrery_context_create(const struct orrery_context_spec *specs, size_t count, unsigned options,
                          int *caller, uint64_t *args);

/*
 * Switches to the context `target`. Returns when control comes back: the descriptor of the context that it
 * comes from, with its argument in *result (which may be null).
 *
 * Errors, beside those above:
 *   EOWNERDEAD  the context died while it had control, or whoever it switched to did and nobody else waited;
 *               or the calling thread ended there
 */
int orrery_context_switch(int target, uint64_t args, uint64_t *result);

/*
 * The same with `length` bytes, and, unless `limit` is 0, for no longer than `limit` milliseconds: whoever
 * has control then is killed.
 *
 * Errors, beside those of orrery_context_switch:
 *   EMSGSIZE   more than ORRERY_CONTEXT_MESSAGE_MAX bytes
 *   ETIMEDOUT  control did not come back in time
 *   EINVAL     a limit for a switch to the root; bytes is null and length is not 0
 */
int orrery_context_switch_bytes(int target, uint64_t args, const void *bytes, size_t length, unsigned limit,
                                uint64_t *result);

/* Copies the bytes that came with the last arrival in this context, `room` at most; returns how many came. */
size_t orrery_context_received(void *buffer, size_t room);

/*
 * Narrows what holders of this descriptor may do to what of it the specifications name (ORRERY_CONTEXT_VM,
 * ORRERY_CONTEXT_FD, ORRERY_CONTEXT_SYSCALL; how is of no meaning). Without any, to nothing.
 */
int orrery_context_restrict(int target, const struct orrery_context_spec *specs, size_t count);

/*
 * Maps memory of `target` at the same place of the calling context, whose own memory there is gone: a copy
 * (ORRERY_CONTEXT_COW), or the memory itself (ORRERY_CONTEXT_SHARE). ORRERY_CONTEXT_UNMAP removes the overlay:
 * nothing is mapped there then. Or puts copies of its descriptors in the place of the same numbers
 * (ORRERY_CONTEXT_FD, ORRERY_CONTEXT_COW). Specifications are done in order; if one fails, those before it stay.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor carries no right to all of a range
 */
int orrery_context_overlay(int target, const struct orrery_context_spec *specs, size_t count);

/* A system call that a context was stopped in. */
struct orrery_context_call {
    long number;
    uint64_t args[6];
};

/* Whether control last came here by a system call of the context that orrery_context_switch returned; which one
 * it was. */
int orrery_context_trapped_call(struct orrery_context_call *call);

/*
 * Copies memory of a context that was created here with ORRERY_CONTEXT_TRAP_SYSCALLS; returns how many bytes are
 * there. EINVAL where none is, EACCES after orrery_context_restrict, ENOMSG where it is not such a context.
 */
ssize_t orrery_context_copy_in(int target, uint64_t address, void *buffer, size_t length);

/* The same of a path, with its end. EMSGSIZE where it does not fit. */
int orrery_context_copy_path(int target, uint64_t address, char *path, size_t room);

/* Writes into its memory. */
int orrery_context_copy_out(int target, uint64_t address, const void *bytes, size_t length);

/* Puts a descriptor of ours into a context that is stopped in a system call; returns its number there. */
int orrery_context_install_fd(int target, int descriptor);

/*
 * Lets the call go on in which the context is stopped, as orrery_context_switch returns. What its arguments point to
 * may have changed since it was looked at, where others can write there. ENOMSG where it is in no call.
 */
int orrery_context_proceed(int target, uint64_t *result);

/* For the mask of orrery_context_syscall: what is the caller's, not the target's. */
#define ORRERY_CONTEXT_CALLERS(type) (1u << (type))

/*
 * Makes a system call for a context, as if it had made it itself, except for what the mask says is the
 * caller's: ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_VM), the memory that arguments point to;
 * ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_FD); ORRERY_CONTEXT_CALLERS(ORRERY_CONTEXT_CRED). Six arguments; *result is
 * what the kernel returned, -4095 to -1 are errors.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor carries no right to the call, or to memory or a descriptor that the caller needs to
 *             make it
 *   ENOSYS    the call cannot be put together from two contexts
 */
int orrery_context_syscall(int target, unsigned mask, long number, const uint64_t args[6], int64_t *result);

/*
 * Has the context `target` keep its state as it is now, parked, for the case that it is killed: the switch that
 * meets its death fails with EOWNERDEAD (or ETIMEDOUT) once, and the next one finds it where it was when this was
 * called, by the same descriptors, with the calling thread alone. Shared memory is not restored.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor does not carry all rights, or the context's system calls are withheld
 */
int orrery_context_checkpoint(int target);

/*
 * Forks the program with all its contexts: the child has copies of them, by the same descriptors, and the calling
 * thread alone. What was ORRERY_CONTEXT_SHARE is shared among the child's contexts, apart from the parent's;
 * MAP_SHARED memory is one in all. Returns as fork(2) does. After a plain fork(2) the first call about contexts in
 * the child does the same, as the contexts are then. Contexts that run, are stopped, whose system calls are trapped,
 * or from which those are withheld that it takes (sendmsg, pidfd_open, kill ...), have no copy: they have ended
 * (ESRCH) in the child.
 *
 * Errors, beside those above:
 *   ECHILD    not called in the root
 */
pid_t orrery_context_fork(void);

/* Closes a descriptor of a context. */
int orrery_context_close(int target);

#ifdef __cplusplus
}
#endif

#endif
