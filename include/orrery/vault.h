/*
 * Orrery: a vault keeps secrets in a process of its own, which answers calls and shows nothing else.
 *
 *     static ssize_t load(void *keys, const void *path, size_t length, void *answer, size_t room);
 *     static ssize_t sign(void *keys, const void *data, size_t length, void *answer, size_t room);
 *
 *     struct orrery_vault *vault = orrery_vault_create(load, sign, &keys);
 *     if (!vault)
 *         err(1, "%s", orrery_last_error());
 *     orrery_vault_load(vault, path, strlen(path), NULL, 0);  // reads the key, over there
 *     ...                                                     // becomes a daemon, forks workers, drops its rights
 *     length = orrery_vault_call(vault, data, data_length, signature, sizeof signature);
 *
 * Link with -lorrery. All processes of the program share the vault, those forked later included: each that calls
 * gets a twin of the vault for itself, which has what was loaded. Threads may call at the same time. The vault ends
 * when no process of the program is left.
 *
 * Each process has a connection to the vault of its own, and memory of its own for its calls, so that none sees, spoils
 * or ends what another one asks. fork(3) asks for the child's connection before, and closes the parent's in the child
 * (pthread_atfork(3)); a process made by a bare clone(2) shares that of its parent.
 *
 * WHO CANNOT READ IT
 *
 * The vault is closed to debuggers (PR_SET_DUMPABLE in prctl(2)) before it loads anything, leaves no core, and
 * shares no memory with the program but a line for requests and answers. No process of an ordinary user can read it,
 * whatever code it runs; processes with CAP_SYS_PTRACE over it can. So a server makes it as root and then changes
 * its user. Only the user who made the vault, and the superuser, may have something loaded; they, and the first
 * other user who comes, may call.
 *
 * The process that loads is confined, too, since it parses what workers send: it can open files for reading, with
 * CAP_DAC_READ_SEARCH if the program had it, and has no other capability but CAP_IPC_LOCK. Other system calls that
 * lead out of it fail with EPERM (orrery_vault_set_load_unconfined).
 *
 * DEATHS
 *
 * A twin that dies is replaced, and the call that it died of made once more. A keeper that dies is replaced by its
 * spare.
 *
 * ERRORS
 *
 * Calls that fail return NULL or -1 and set errno; orrery_last_error returns a text:
 *
 *   EOWNERDEAD  the vault is gone: keeper and spare were killed at the same time; make a new one
 *   ETIMEDOUT   no answer within 30 seconds
 *   EPERM       this user may not
 *   EUSERS      there are too many twins
 *   EMSGSIZE    a request or an answer is too long, or does not fit into what was given for it
 *   EINVAL      a null where none may be
 *   others      what a function of the vault returned, or a system call
 */
#ifndef ORRERY_VAULT_H
#define ORRERY_VAULT_H

#include <orrery/error.h>

#include <stddef.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How many bytes a call, or its answer, may have; and those of loading. */
#define ORRERY_VAULT_MESSAGE_MAX 1048576
#define ORRERY_VAULT_LOAD_MAX 16384

struct orrery_vault;

/*
 * A function of the vault, run there. It reads `length` bytes of request and writes at most `room` bytes of answer.
 * Returns how many it wrote, or less than 0: an errno, as in -ENOENT, which the caller gets.
 */
typedef ssize_t (*orrery_vault_function)(void *context, const void *request, size_t length, void *answer,
                                         size_t room);

/*
 * Makes a vault from a copy of the calling process. `context` is given to the functions as it is; what it points to
 * is a copy there.
 *
 * Errors, beside those above:
 *   EAGAIN    the program has other threads: make vaults before them
 */
struct orrery_vault *orrery_vault_create(orrery_vault_function load, orrery_vault_function serve,
                                         void *context);

/*
 * Allows `load` all that the user may do, with all capabilities, in vaults that this process makes with
 * orrery_vault_create, or becomes with orrery_vault_run, from now on: to write files, connect sockets, run programs. An
 * attacker who finds a hole in what parses requests may do the same. Off by default.
 */
void orrery_vault_set_load_unconfined(int unconfined);

/*
 * Starts another program as a vault. It has nothing of the caller's: no memory, no files, no environment. It calls
 * orrery_vault_run. `program` is a path. `arguments` begins with its own name and ends with NULL. The caller may have
 * threads.
 */
struct orrery_vault *orrery_vault_spawn(const char *program, const char *const *arguments);

/*
 * Runs the vault's request loop in a program that orrery_vault_spawn started; never returns unless it
 * fails. The program must have one thread.
 *
 * Errors:
 *   ENOTSOCK  it was not started as a vault
 */
int orrery_vault_run(orrery_vault_function load, orrery_vault_function serve, void *context);

/*
 * As orrery_vault_run, with a function that drops what is not needed any more, or NULL. It is called whenever the
 * vault is about to sleep, and then after so many milliseconds as it returned, unless that is less than 0. Returning
 * 0 says that something was dropped: the vault makes its spare again, which has it, too, and calls again. Twins keep
 * what they have.
 */
typedef long (*orrery_vault_cleanup)(void *context);
int orrery_vault_run_with_cleanup(orrery_vault_function load, orrery_vault_function serve,
                                  orrery_vault_cleanup tidy, void *context);

/*
 * Returns 1 where the vault's memory is locked (mlockall(2)), so that the secrets are never written to the swap
 * partition; 0 where that is not allowed: the vault lacks CAP_IPC_LOCK, and RLIMIT_MEMLOCK is less than it has. -1 with
 * EINVAL for NULL.
 */
int orrery_vault_is_locked(const struct orrery_vault *vault);

/* Runs `load` in the vault. Returns the length of its answer; the request and the room for the answer do not overlap. */
ssize_t orrery_vault_load(const struct orrery_vault *vault, const void *request, size_t length, void *answer,
                          size_t room);

/* Runs `serve` in the twin of the calling process. Returns the length of its answer; again the two do not overlap. */
ssize_t orrery_vault_call(const struct orrery_vault *vault, const void *request, size_t length, void *answer,
                          size_t room);

/* Closes this process's handle of the vault, which must not be used afterwards.
 * orrery_vault_close(NULL) is a no-op. */
void orrery_vault_close(struct orrery_vault *vault);

#ifdef __cplusplus
}
#endif

#endif
