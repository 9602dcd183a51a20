// Calls on a stack of 2 KiB, as a goroutine's is, in a program that provides an alternate stack of 64 KiB for signals. What lies
// below the small stack has to stay as it was. With an argument, the same instruction makes calls before that, on a large stack.

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

#define CALLS 64
#define SMALL 2048

static char memory[1 << 16] __attribute__((aligned(64)));
static char alternate[1 << 16];

// openat(AT_FDCWD, "/nowhere", O_RDONLY) with the stack pointer at `top`.
static __attribute__((noinline)) long open_on(char *top) {
    long result;
    __asm__ volatile("movq %%rsp, %%rbx\n"
                     "movq %[top], %%rsp\n"
                     "movl $257, %%eax\n"
                     "syscall\n"
                     "movq %%rbx, %%rsp\n"
                     : "=a"(result)
                     : [top] "r"(top), "D"((long)AT_FDCWD), "S"("/nowhere"), "d"(0L)
                     : "rbx", "rcx", "r11", "memory");
    return result;
}

static int missing(char *top) {
    int count = 0;
    for (int i = 0; i < CALLS; i++)
        count += open_on(top) == -2;
    return count;
}

int main(int count, char **arguments) {
    (void)arguments;
    char *top = memory + sizeof(memory);
    if (count > 1)
        printf("before: %d\n", missing(top));
    stack_t stack = {.ss_sp = alternate, .ss_size = sizeof(alternate)};
    if (sigaltstack(&stack, NULL) != 0) {
        perror("sigaltstack");
        return 1;
    }
    memset(memory, 0x5a, sizeof(memory));
    printf("on the small stack: %d\n", missing(top));
    int changed = 0;
    for (size_t i = 0; i < sizeof(memory) - SMALL; i++)
        changed += memory[i] != 0x5a;
    printf("changed below it: %d\n", changed);
    return changed != 0;
}
