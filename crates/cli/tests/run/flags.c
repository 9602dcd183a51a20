// Calls that a policy decides about, with each set of the flags that a program can have there: the call leaves them as they are.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <sys/syscall.h>

// Carry, parity, adjust, zero, sign, direction, overflow.
static const uint64_t bits[] = {1 << 0, 1 << 2, 1 << 4, 1 << 6, 1 << 7, 1 << 10, 1 << 11};
enum { BITS = sizeof bits / sizeof *bits, ROUNDS = 40 };

static uint64_t call_with(uint64_t flags, long *result) {
    uint64_t after;
    __asm__ volatile("lea -128(%%rsp), %%rsp\n\t"
                     "push %[flags]\n\t"
                     "popfq\n\t"
                     "mov %[number], %%eax\n\t"
                     "syscall\n\t"
                     "pushfq\n\t"
                     "pop %[after]\n\t"
                     "cld\n\t"
                     "lea 128(%%rsp), %%rsp"
                     : "=&a"(*result), [after] "=&r"(after)
                     : [flags] "r"(flags), [number] "i"(SYS_getpgid), "D"(1234567L)
                     : "rcx", "r11", "cc", "memory");
    return after;
}

int main(void) {
    uint64_t all = 0;
    for (int i = 0; i < BITS; i++)
        all |= bits[i];
    int wrong = 0;
    long answers = 0;
    // From a place that is dispatched at first, and rewritten then.
    for (int round = 0; round < ROUNDS; round++)
        for (int set = 0; set < 1 << BITS; set++) {
            uint64_t flags = 0x202;
            for (int i = 0; i < BITS; i++)
                flags |= set >> i & 1 ? bits[i] : 0;
            long result;
            uint64_t after = call_with(flags, &result);
            answers += result == -71;
            if ((after & all) != (flags & all) && wrong++ < 8)
                printf("%lx became %lx\n", (unsigned long)(flags & all), (unsigned long)(after & all));
        }
    printf("%d wrong, %ld answers\n", wrong, answers);
    return wrong != 0;
}
