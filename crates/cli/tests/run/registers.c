// Makes calls with values in all registers that a call keeps, and says how often one was lost.
#include <stdint.h>
#include <stdio.h>

#define WIDE(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11) f(12) f(13) f(14) f(15)
#define LOAD(n) "movdqu 16*" #n "(%%r12), %%xmm" #n "\n\t"
#define STORE(n) "movdqu %%xmm" #n ", 16*" #n "(%%r13)\n\t"

int main(void) {
    uint64_t before[32], after[32], kept[6], flags;
    long wrong = 0, result;
    for (int i = 0; i < 32; i++)
        before[i] = 0x0101010101010101 * (uint64_t)(i + 1);
    for (int i = 0; i < 1000; i++) {
        __asm__ volatile(
            "mov %3, %%r12\n\tmov %4, %%r13\n\tmov %5, %%r14\n\t" WIDE(
                LOAD) "movq $-8, -8(%%rsp)\n\tmovq $-128, -128(%%rsp)\n\t"
                      "mov $1, %%edi\n\tmov $2, %%esi\n\tmov $3, %%edx\n\tmov $4, %%r10d\n\tmov $5, %%r8d\n\t"
                      "mov $6, %%r9d\n\tstd\n\tstc\n\tmov $110, %%eax\n\tsyscall\n\t"
                      "pushfq\n\tpop %%r11\n\tcld\n\t" WIDE(
                          STORE) "mov %%rdi, (%%r14)\n\tmov %%rsi, 8(%%r14)\n\tmov %%rdx, 16(%%r14)\n\t"
                                 "mov %%r10, 24(%%r14)\n\tmov %%r8, 32(%%r14)\n\tmov %%r9, 40(%%r14)\n\t"
                                 "mov -128(%%rsp), %%rcx\n\tmov %%r11, %1\n\tmov %%rcx, %2"
            : "=&a"(result), "=&m"(flags), "=&m"(kept[0])
            : "r"(before), "r"(after), "r"(kept)
            : "rcx", "r11", "rdi", "rsi", "rdx", "r8", "r9", "r10", "r12", "r13", "r14", "memory", "cc",
              "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
              "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
        for (int j = 0; j < 32; j++)
            wrong += before[j] != after[j];
        for (int j = 1; j < 6; j++)
            wrong += kept[j] != (uint64_t)j + 1;
        wrong += kept[0] != (uint64_t)-128;
        // Carry and direction.
        wrong += !(flags & 1) + !(flags & 0x400);
    }
    printf("1000 calls, %ld wrong\n", wrong);
    return 0;
}
