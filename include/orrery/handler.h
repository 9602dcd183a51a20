/*
 * Orrery: handlers of system calls, in C.
 *
 *     #include <orrery/handler.h>
 *
 *     ORRERY_DECIDE(call) {
 *         return orrery_argument(0) == 1234 ? ORRERY_FAIL(ORRERY_ESRCH) : ORRERY_PASS;
 *     }
 *
 * A handler is a WebAssembly module that a rule of a policy names (`handler = "module.wasm"`): it decides, inside the executive, about
 * the calls that the rule is about. It is compiled without a C library, for the first version of WebAssembly:
 *
 *     clang --target=wasm32 -mcpu=mvp -O2 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=8192 -o module.wasm module.c
 *
 * It has integers, 64 KiB of memory with its stack and its data, and 8 variables that change outside of memory, of which the stack
 * pointer is one. Calls by pointers are refused when the policy is read. Each decision begins with the memory and the variables that
 * the module says: nothing stays from one call to the next.
 *
 * A handler that divides by zero, names memory that it does not have or an argument beyond the sixth, or takes too long has failed: the
 * call is refused with EPERM.
 */
#ifndef ORRERY_HANDLER_H
#define ORRERY_HANDLER_H

#ifndef __wasm__
#error "handlers are compiled with clang --target=wasm32"
#endif
#ifdef ORRERY_EXTENSION_H
#error "a module is a handler or an extension"
#endif

#include <stddef.h>
#include <stdint.h>

/* The call goes on, with its arguments as they are now: later rules are asked. */
#define ORRERY_PASS 0
/* The call is performed, and later rules are not asked. */
#define ORRERY_ALLOW 1
/* The call returns what orrery_answer was given, and is not performed. */
#define ORRERY_ANSWER 2
/* The call fails with this error, a number from 1 to 4095, and is not performed. */
#define ORRERY_FAIL(error) (-(error))

/* Errors of Linux, since there is no errno.h here; others are as good. */
#define ORRERY_EPERM 1
#define ORRERY_ENOENT 2
#define ORRERY_ESRCH 3
#define ORRERY_EIO 5
#define ORRERY_EAGAIN 11
#define ORRERY_ENOMEM 12
#define ORRERY_EACCES 13
#define ORRERY_EFAULT 14
#define ORRERY_EINVAL 22
#define ORRERY_ENOSPC 28
#define ORRERY_ENAMETOOLONG 36
#define ORRERY_ENOSYS 38
#define ORRERY_EMSGSIZE 90
#define ORRERY_ECONNREFUSED 111

/* The longest report in bytes. */
#define ORRERY_REPORT 352

#define ORRERY_IMPORT_(name) __attribute__((import_module("orrery"), import_name(name)))

/* Begins the function that is called for each call, with its number; it returns one of the verdicts above. */
#define ORRERY_DECIDE(call)                                                                                  \
    __attribute__((export_name("decide"))) int32_t orrery_decide_(int32_t call __attribute__((unused)))

/* Returns an argument of the call, 0 to 5, as the program gave it. */
ORRERY_IMPORT_("argument") int64_t orrery_argument(int32_t index);

/* Has the call performed with another argument. */
ORRERY_IMPORT_("set_argument") void orrery_set_argument(int32_t index, int64_t value);

/*
 * Copies what an argument points to, from `offset` on. Returns the number of bytes, which is less where the program's memory ends, or
 * -ORRERY_EFAULT where there is none.
 */
ORRERY_IMPORT_("copy_from")
int32_t orrery_copy_from(int32_t index, uint32_t offset, void *to, size_t length);

/*
 * Has the call performed with the argument pointing to a copy of these bytes, with a zero behind them. Returns 0, or
 * -ORRERY_ENAMETOOLONG where there is no more room: all copies of one call have 8 KiB together.
 */
ORRERY_IMPORT_("replace") int32_t orrery_replace(int32_t index, const void *from, size_t length);

/* What the call returns, for ORRERY_ANSWER. */
ORRERY_IMPORT_("answer") void orrery_answer(int64_t value);

/* Has the call wait before whatever becomes of it: a second at most, and the last one holds. */
ORRERY_IMPORT_("delay") void orrery_delay(int64_t nanoseconds);

/*
 * Adds to one of the process's counters, 0 to 63, which all handlers of the policy share. Returns what it is then. Threads add in one
 * step, a forked child has a copy, and a program that is executed begins with zeros.
 */
ORRERY_IMPORT_("count") int64_t orrery_count(int32_t counter, int64_t amount);

/* Reports up to ORRERY_REPORT bytes. Returns 0, or -ORRERY_EMSGSIZE. */
ORRERY_IMPORT_("emit") int32_t orrery_emit(const void *bytes, size_t length);

/*
 * Copies the string that an argument points to, a path for instance, with the zero at its end. Returns its length without that,
 * -ORRERY_EFAULT where the program has no memory, or -ORRERY_ENAMETOOLONG where the string is longer than the room.
 *
 * Another thread can change what the argument points to afterwards: have the call use what was looked at, by orrery_replace.
 */
static inline int32_t orrery_copy_string(int32_t index, char *to, size_t room) {
    int32_t copied = orrery_copy_from(index, 0, to, room);
    for (int32_t length = 0; length < copied; length++)
        if (!to[length])
            return length;
    return copied < 0 ? copied : -ORRERY_ENAMETOOLONG;
}

#endif
