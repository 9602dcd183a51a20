/*
 * Orrery: contexts of the running program, each with memory, descriptors and credentials of its own, into
 * which its thread steps and back.
 *
 *     int caller;
 *     uint64_t args;
 *     int new = lwCreate(NULL, 0, 0, &caller, &args);
 *     if (new < 0)
 *         err(1, "lwCreate: %s", lw_error());
 *     if (caller != -1)                       // the new context, switched to for the first time
 *         for (;;)
 *             caller = lwSwitch(caller, args * 2, &args);
 *     lwSwitch(new, 21, &args);               // the creator: args is 42
 *
 * Link with -lorrery. From "Light-Weight Contexts: An OS Abstraction for Safety and Performance" (Litton et
 * al., OSDI 2016), sections 3.1 to 3.9, on a stock Linux kernel. lw_error (orrery/lwc.h) says in words what
 * went wrong.
 *
 * CONTEXTS
 *
 * lwCreate copies the calling context as fork(2) copies a process: memory (copy-on-write), descriptors,
 * credentials. The copy does not run until somebody switches to it; then lwCreate returns there, too. A
 * thread is in one context at a time: whoever calls lwSwitch stops there until control comes back, from
 * whichever context. Arguments are a number, and up to LWC_ROOM bytes (lwSwitchBytes, lwReceived). The only ways into a
 * context are returns of lwCreate and lwSwitch, and its signal handlers.
 *
 * Underneath, each context is a process; the program's own one, the root, is the parent of all. wait(2) does
 * not see them. They end when the root ends, however that may be. An exit in any context ends the program
 * with its status. A context that is killed, or dies of a fault, is an error of the switch that waits for it.
 *
 * DESCRIPTORS
 *
 * A context is named by a descriptor. It ends when the last context that holds one closes it, unless it has
 * control. A new context holds one of its creator; whoever is switched to holds one of its caller. Close them
 * with lwClose, which also lets go of what the library keeps; close(2) ends contexts just the same. Copies
 * (dup(2)) and what came over a socket of your own (SCM_RIGHTS in unix(7)) name the same context, with the
 * same rights; a process forked by fork(2) holds copies, too. The root is LWC_ROOT in every context.
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
 * A creator may overlay its own memory with any of its context's (lwOverlay); a context with what of its
 * creator's the specification marked LWC_MAY_OVERLAY; so with descriptors, and with system calls that are made
 * for another context (lwSyscall). lwRestrict narrows what a descriptor allows, at once,
 * for all who hold it, for good. The owner of the memory checks. A context is closed to debuggers and other
 * processes of its user (PR_SET_DUMPABLE in prctl(2)), unless LWC_DUMPABLE; the superuser can look into it.
 *
 * SYSTEM CALLS
 *
 * A context may not make the system calls that were marked LWC_UNMAP: they fail with EPERM. With LWC_SYSTRAP
 * they arrive in its creator, whose lwSwitch returns, with lwCalled telling the call. The creator looks at what
 * the arguments point to (lwCopyIn, lwCopyPath: once, for it may change), may make the call itself (lwSyscall)
 * or put a descriptor there (lwGive), and answers by switching back with what the call returns: -4095 to -1
 * are errors.
 *
 * SIGNALS
 *
 * What the kernel raises for something that a context did (SIGSEGV, SIGFPE, SIGPIPE ...) it gets. Others go to
 * the root at once, even while another context has control, and to contexts with LWC_SHAREDSIGNALS.
 *
 * ERRORS
 *
 * Calls that fail return -1 and set errno. Beside those listed at each call:
 *
 *   EBUSY     a signal handler interrupted another call about contexts
 *   EPERM     the calling thread does not exist in that context: it began after that was created, or was not
 *             taken along (LWC_ALONE)
 *   EAGAIN    more than 256 threads use contexts
 *   ECHILD    contexts belong to another process, of which this one was forked, and could not be copied
 *   EBADF     the descriptor names no context here
 *   EDEADLK   the descriptor names the calling context itself
 *   ESRCH     the context has ended before
 *   EINVAL    a range is empty, not made of pages of 4096 bytes, given twice, or of memory that cannot be
 *             shared: the stack, unmapped, not readable and writable
 *   ETIMEDOUT    the context is stopped by a signal and did not answer (lwOverlay, lwRestrict, lwSyscall)
 *   EINPROGRESS  the context is stopped in a system call that its creator must answer first
 *   others    what a system call answered: EMFILE, ENOMEM, EAGAIN (RLIMIT_NPROC) ...
 */
#ifndef ORRERY_CONTEXT_H
#define ORRERY_CONTEXT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a specification is about. */
#define LWC_VM 1      /* memory: addresses and bytes, whole pages */
#define LWC_FD 2      /* descriptors: the first one, and how many */
#define LWC_SYSCALL 3 /* system calls: the first number (SYS_...), and how many */
#define LWC_CRED 4    /* credentials: all of them (0, LWC_ALL); and in the mask of lwSyscall */

/* What becomes of it. */
#define LWC_COW 0x1 /* lwCreate: a copy, as without a specification; lwOverlay: a copy */
/* memory: one and the same in both contexts, at the same address; descriptors, all of them (0, LWC_ALL): one
 * table, in which both find what either opens, including names of contexts with all rights; credentials:
 * who either becomes, the other is when control next comes there */
#define LWC_SHARE 0x2
#define LWC_UNMAP 0x4 /* lwCreate: not in the new context; lwOverlay: remove the overlay */
#define LWC_MAY_ACCESS                                                                                       \
    0x8 /* lwCreate: the new context may overlay it or have it called; with another or alone */
#define LWC_MAY_OVERLAY 0x8 /* the same by the paper's other name */

/* A length: all there is from `start` on. */
#define LWC_ALL ((size_t)-1)

/* The descriptor of the root, in every context. It carries no rights. */
#define LWC_ROOT 1000

struct lwc_spec {
    int type;
    unsigned how;
    uintptr_t start;
    size_t length;
};

/* Options of lwCreate. */
#define LWC_SHAREDSIGNALS 0x1 /* gets signals that no context caused, if its creator does */
#define LWC_DUMPABLE 0x2      /* is as open to debuggers as its creator */
/* Calls that it may not make arrive in its creator; without any LWC_SYSCALL, those that name files, processes
 * and sockets: about what FreeBSD's capability mode takes away. */
#define LWC_SYSTRAP 0x4
/* No thread but the calling one may ever switch there, and the others are not held still. */
#define LWC_ALONE 0x8
/* It can neither signal nor trace processes that are not its own or started by it, its creator and the root included, nor
 * change how they run: their limits, CPUs, scheduling and priorities (prlimit, sched_setaffinity, setpriority, ioprio_set and
 * the like fail with EPERM, unless they name the caller). It takes Landlock's scopes (Linux 6.12): without them lwCreate
 * fails with EOPNOTSUPP. */
#define LWC_ISOLATED 0x10

/* How many bytes a switch carries. */
#define LWC_ROOM 65536

/*
 * Creates a context. Returns its descriptor in the creator, where *caller is -1. Returns again in the new
 * context when somebody first switches to it: the descriptor of its creator, with that of the caller in
 * *caller and its argument in *args. Memory marked LWC_SHARE must not be malloc's.
 *
 * Errors, beside those above:
 *   EINVAL    caller or args is null; a type, how or option is unknown; LWC_SHARE of a part of the
 *             descriptors or credentials, of all descriptors together with LWC_UNMAP of some or with LWC_SYSTRAP,
 *             or of system calls
 *   ENOSPC    there are 4096 contexts
 *   EFAULT    the new context died of what was unmapped
 */
int lwCreate(const struct lwc_spec *specs, size_t count, unsigned options, int *caller, uint64_t *args);

/*
 * Switches to the context `target`. Returns when control comes back: the descriptor of the context that it
 * comes from, with its argument in *result (which may be null).
 *
 * Errors, beside those above:
 *   EOWNERDEAD  the context died while it had control, or whoever it switched to did and nobody else waited;
 *               or the calling thread ended there
 */
int lwSwitch(int target, uint64_t args, uint64_t *result);

/*
 * The same with `length` bytes, and, unless `limit` is 0, for no longer than `limit` milliseconds: whoever
 * has control then is killed.
 *
 * Errors, beside those of lwSwitch:
 *   EMSGSIZE   more than LWC_ROOM bytes
 *   ETIMEDOUT  control did not come back in time
 *   EINVAL     a limit for a switch to the root; bytes is null and length is not 0
 */
int lwSwitchBytes(int target, uint64_t args, const void *bytes, size_t length, unsigned limit,
                  uint64_t *result);

/* Copies the bytes that came with the last arrival in this context, `room` at most; returns how many came. */
size_t lwReceived(void *buffer, size_t room);

/*
 * Narrows what holders of this descriptor may do to what of it the specifications name (LWC_VM, LWC_FD,
 * LWC_SYSCALL; how is of no meaning). Without any, to nothing.
 */
int lwRestrict(int target, const struct lwc_spec *specs, size_t count);

/*
 * Maps memory of `target` at the same place of the calling context, whose own memory there is gone: a copy
 * (LWC_COW), or the memory itself (LWC_SHARE). LWC_UNMAP removes the overlay: nothing is mapped there then.
 * Or puts copies of its descriptors in the place of the same numbers (LWC_FD, LWC_COW).
 * Specifications are done in order; if one fails, those before it stay.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor carries no right to all of a range
 */
int lwOverlay(int target, const struct lwc_spec *specs, size_t count);

/* A system call that a context was stopped in. */
struct lwc_call {
    long number;
    uint64_t args[6];
};

/* Whether control last came here by a system call of the context that lwSwitch returned; which one it was. */
int lwCalled(struct lwc_call *call);

/*
 * Copies memory of a context that was created here with LWC_SYSTRAP; returns how many bytes are there. EINVAL
 * where none is, EACCES after lwRestrict, ENOMSG where it is not such a context.
 */
ssize_t lwCopyIn(int target, uint64_t address, void *buffer, size_t length);

/* The same of a path, with its end. EMSGSIZE where it does not fit. */
int lwCopyPath(int target, uint64_t address, char *path, size_t room);

/* Writes into its memory. */
int lwCopyOut(int target, uint64_t address, const void *bytes, size_t length);

/* Puts a descriptor of ours into a context that is stopped in a system call; returns its number there. */
int lwGive(int target, int descriptor);

/*
 * Lets the call go on in which the context is stopped, as lwSwitch returns. What its arguments point to may
 * have changed since it was looked at, where others can write there. ENOMSG where it is in no call.
 */
int lwProceed(int target, uint64_t *result);

/* For the mask of lwSyscall: what is the caller's, not the target's. */
#define LWC_OWN(type) (1u << (type))

/*
 * Makes a system call for a context, as if it had made it itself, except for what the mask says is the
 * caller's: LWC_OWN(LWC_VM), the memory that arguments point to; LWC_OWN(LWC_FD); LWC_OWN(LWC_CRED). Six
 * arguments; *result is what the kernel returned, -4095 to -1 are errors.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor carries no right to the call, or to memory or a descriptor that the caller needs to
 *             make it
 *   ENOSYS    the call cannot be put together from two contexts
 */
int lwSyscall(int target, unsigned mask, long number, const uint64_t args[6], int64_t *result);

/*
 * Has the context `target` keep its state as it is now, parked, for the case that it is killed: the switch that
 * meets its death fails with EOWNERDEAD (or ETIMEDOUT) once, and the next one finds it where it was when this was
 * called, by the same descriptors, with the calling thread alone. Shared memory is not put back.
 *
 * Errors, beside those above:
 *   EACCES    the descriptor does not carry all rights, or the context's system calls are withheld
 */
int lwKeepGood(int target);

/*
 * Forks the program with all its contexts: the child has copies of them, by the same descriptors, and the calling
 * thread alone. What was LWC_SHARE is shared among the child's contexts, apart from the parent's; MAP_SHARED
 * memory is one in all. Returns as fork(2) does. After a plain fork(2) the first call about contexts in the child
 * does the same, as the contexts are then. Contexts that run, are stopped, whose system calls are trapped, or from
 * which those are withheld that it takes (sendmsg, pidfd_open, kill ...), have no copy: they have ended (ESRCH) in
 * the child.
 *
 * Errors, beside those above:
 *   ECHILD    not called in the root
 */
pid_t lwFork(void);

/* Closes a descriptor of a context. */
int lwClose(int target);

#ifdef __cplusplus
}
#endif

#endif
