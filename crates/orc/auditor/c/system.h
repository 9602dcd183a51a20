/* System calls without a C library, and the few functions that would come from one. */
#ifndef ORRERY_AUDITOR_SYSTEM_H
#define ORRERY_AUDITOR_SYSTEM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

#if defined(__x86_64__)
static inline long system_call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#elif defined(__aarch64__)
static inline long system_call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}
#else
#error "no system calls are known for this processor"
#endif

#define CALL6(number, a, b, c, d, e, f)                                                                      \
    system_call(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))
#define CALL3(number, a, b, c) CALL6(number, a, b, c, 0, 0, 0)

/* Whether a system call that returns an address has failed. */
static inline int has_failed(long result) { return result < 0 && result > -4096; }

static inline size_t length_of(const char *text) {
    size_t length = 0;
    while (text[length])
        length++;
    return length;
}

static inline int same(const void *a, const void *b, size_t length) {
    const unsigned char *x = a, *y = b;
    for (size_t i = 0; i < length; i++)
        if (x[i] != y[i])
            return 0;
    return 1;
}

static inline void copy(void *to, const void *from, size_t length) {
    unsigned char *x = to;
    const unsigned char *y = from;
    for (size_t i = 0; i < length; i++)
        x[i] = y[i];
}

#endif
