/* Waits in a system call until the test lets the thread go on as a rescue would, and says what came of it. */
#include <errno.h>
#include <orrery/failover.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static long asked_for;
static char buffer[8];

/* Settles a read: it gives what it likes, after having used the vector registers. */
static long settle(const struct orrery_failover_call *call) {
    volatile double busy = 0;
    for (int i = 0; i < 100; i++)
        busy += i / 3.0;
    asked_for = call->number;
    if (call->arguments[1] != (long)buffer || call->arguments[2] != sizeof buffer || busy < 1)
        return -EFAULT;
    memcpy(buffer, "settled", 8);
    return 8;
}

int main(void) {
    int ends[2];
    if (pipe(ends) || orrery_failover_set_handler(SYS_read, settle) ||
        orrery_failover_set_result(SYS_pause, -ECANCELED))
        return 1;
    if (orrery_failover_set_result(-1, ORRERY_FAILOVER_RETRY) != -1 || errno != EINVAL)
        return 2;
    printf("ready\n");
    fflush(stdout);

    /* All registers that a system call leaves alone hold something, the red zone too. */
    register long kept_bx __asm__("rbx") = 11;
    register long kept_12 __asm__("r12") = 12;
    register long kept_15 __asm__("r15") = 15;
    double vector = 1.5;
    long result, low = 0;
    __asm__ volatile("movsd %[vector], %%xmm3\n\t"
                     "movq $4711, -64(%%rsp)\n\t"
                     "syscall\n\t"
                     "movq -64(%%rsp), %[low]\n\t"
                     "movsd %%xmm3, %[vector]\n\t"
                     : "=a"(result), [low] "=r"(low), [vector] "+m"(vector), "+r"(kept_bx), "+r"(kept_12),
                       "+r"(kept_15)
                     : "a"(SYS_read), "D"((long)ends[0]), "S"(buffer), "d"(sizeof buffer)
                     : "rcx", "r11", "xmm3", "memory");
    printf("read %ld %s call %ld kept %ld %ld %ld red %ld vector %.1f\n", result, buffer, asked_for, kept_bx,
           kept_12, kept_15, low, vector);
    return 0;
}
