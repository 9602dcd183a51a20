// Sites of all shapes, entered at each of their instructions: directly, while they are stepped through and rewritten
// meanwhile, and by many threads at once. Prints what comes out, which must be the same with an executive.
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#define COPIES 8
#define BOUNDARIES 5
#define CALLS_TO_REWRITE 200

struct site {
    void *boundaries[BOUNDARIES];
};
struct registers {
    uint64_t rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r12, r13, r14, r15, flags;
};

// A call whose result depends on its arguments: lseek(fd, offset, 0) gives the offset.
__asm__(".data\n"
        "flag: .byte 0\n"
        ".macro boundary label, instruction\n"
        "  .ifnb \\instruction\n"
        "    \\label: \\instruction\n"
        "    .pushsection .data.sites, \"aw\"; .quad \\label\\()b; .popsection\n"
        "  .else\n"
        "    .pushsection .data.sites, \"aw\"; .quad 0; .popsection\n"
        "  .endif\n"
        ".endm\n"
        // Nothing before the first instruction can be moved: it is a jump.
        ".macro shape first, second, third, fourth, fifth\n"
        "  .rept 8\n"
        "    .skip 128, 0x90\n"
        "    jmp 60f\n"
        "    60:\n"
        "    boundary 61, \"\\first\"\n"
        "    boundary 62, \"\\second\"\n"
        "    boundary 63, \"\\third\"\n"
        "    boundary 64, \"\\fourth\"\n"
        "    boundary 65, \"\\fifth\"\n"
        "    syscall\n"
        "    69: ret\n"
        "  .endr\n"
        ".endm\n"
        ".section .data.sites, \"aw\"\n"
        "sites:\n"
        ".text\n"
        "shape \"mov $8, %eax\"\n"
        "shape \"mov $8, %rax\"\n"
        "shape \"cmpb $0, flag(%rip)\", \"jne 69f\", \"mov %r8d, %eax\"\n"
        "shape \"testb $1, flag(%rip)\", \"je 64f\", \"mov $110, %eax\", \"mov %r8d, %eax\"\n"
        "shape \"mov %r8, %rsi\", \"mov %r9, %rdi\"\n"
        "shape \"xor %edx, %edx\", \"mov %r9, %rdi\"\n"
        "shape \"xor %edx, %edx\", \"mov %ebx, %esi\", \"mov %ebp, %edi\"\n"
        "shape \"mov 8(%rsp), %edx\", \"mov %ebx, %esi\"\n"
        "shape \"cld\", \"mov 8(%rsp), %edx\"\n"
        "shape \"cld\", \"xor %edx, %edx\", \"mov %ebx, %esi\"\n"
        "shape \"lea flag(%rip), %r10\", \"mov %r8d, %eax\"\n"
        "shape \"mov %rcx, %rdi\", \"mov $8, %eax\"\n"
        "shape \"mov $8, %eax\", \"xor %edx, %edx\", \"cmp %rbx, %rsi\"\n"
        "shape \"mov $8, %eax\", \"dec %ebx\", \"jns 61b\"\n"
        "shape \"cld\", \"mov %r9, %rdi\", \"xor %edx, %edx\"\n"
        // Not to be rewritten: rcx is needed within.
        "shape \"mov %r8, %rsi\", \"mov %rcx, %rdi\"\n"
        ".section .data.sites, \"aw\"\n"
        "sites_end:\n"
        ".text\n");
extern struct site sites[], sites_end[];

static int file;

// Loads registers, calls, stores registers.
void enter(void *from, const struct registers *in, struct registers *out, uint64_t flags);
__asm__(".text\n"
        "enter:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
        "push %rdx\n"
        "push $0\n"
        "push %rcx\n"
        "mov %rdi, %r11\n"
        "mov (%rsi), %rax; mov 8(%rsi), %rbx; mov 16(%rsi), %rcx; mov 24(%rsi), %rdx\n"
        "mov 40(%rsi), %rdi; mov 48(%rsi), %rbp; mov 56(%rsi), %r8; mov 64(%rsi), %r9; mov 72(%rsi), %r10\n"
        "mov 80(%rsi), %r12; mov 88(%rsi), %r13; mov 96(%rsi), %r14; mov 104(%rsi), %r15\n"
        "mov 32(%rsi), %rsi\n"
        "popfq\n"
        "push %r11\n" // What 8(%rsp) is for the site: zero, below this.
        "movq $0, (%rsp)\n"
        "call *%r11\n"
        "pushfq\n"
        "pop %rcx\n"
        "lea 16(%rsp), %rsp\n"
        "pop %r11\n"
        "mov %rax, (%r11); mov %rbx, 8(%r11); mov %rdx, 24(%r11); mov %rsi, 32(%r11); mov %rdi, 40(%r11)\n"
        "mov %rbp, 48(%r11); mov %r8, 56(%r11); mov %r9, 64(%r11); mov %r10, 72(%r11); mov %r12, 80(%r11)\n"
        "mov %r13, 88(%r11); mov %r14, 96(%r11); mov %r15, 104(%r11); mov %rcx, 112(%r11)\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
        "pushfq\n"
        "andq $~0x100, (%rsp)\n" // No more steps.
        "popfq\n"
        "cld\n"
        "ret\n");

static struct registers call_with(void *from, uint64_t flags) {
    uint64_t fd = file;
    struct registers in = {8, 3, fd, 0, 100, fd, fd, 8, fd, 0x10, 0x12, 0x13, 0x14, 0x15, 0}, out = {0};
    enter(from, &in, &out, flags);
    // Addresses differ from run to run; the step flag is ours.
    out.r10 = out.r10 == 0x10 ? 0x10 : 1;
    out.flags &= 0xcd5;
    return out;
}

static void print(const char *what, int shape, int boundary, struct registers r) {
    printf("%s %d+%d: rax %ld rbx %ld rdx %ld rsi %ld rdi %d rbp %d r8 %ld r9 %d r10 %ld r12 %ld r13 %ld r14 "
           "%ld r15 %ld "
           "flags %lx\n",
           what, shape, boundary, r.rax, r.rbx, r.rdx, r.rsi, r.rdi == (uint64_t)file,
           r.rbp == (uint64_t)file, r.r8, r.r9 == (uint64_t)file, r.r10, r.r12, r.r13, r.r14, r.r15, r.flags);
}

static int shapes(void) { return (sites_end - sites) / COPIES; }
static struct site *copy_of(int shape, int copy) { return &sites[shape * COPIES + copy]; }

// Each instruction of a rewritten site is entered.
static void entries(void) {
    for (int shape = 0; shape < shapes(); shape++) {
        struct site *site = copy_of(shape, 0);
        for (int i = 0; i < CALLS_TO_REWRITE; i++)
            call_with(site->boundaries[0], 0);
        for (int round = 0; round < 2; round++)
            for (int boundary = 0; boundary < BOUNDARIES; boundary++)
                for (uint64_t flags = 0; flags <= 0x8d5 && site->boundaries[boundary]; flags += 0x8d5)
                    print("entered", shape, boundary, call_with(site->boundaries[boundary], flags));
    }
}

static struct site *stepped;
static int wanted, steps, arrived;

static void step(int signal, siginfo_t *info, void *context) {
    (void)signal;
    (void)info;
    ucontext_t *at = context;
    steps++;
    if (arrived || at->uc_mcontext.gregs[REG_RIP] != (greg_t)stepped->boundaries[wanted])
        return;
    arrived = 1;
    // The handler's own calls have the site rewritten, of which one instruction has been executed.
    for (int i = 0; i < CALLS_TO_REWRITE; i++)
        call_with(stepped->boundaries[0], 0);
}

// A site is rewritten while its thread stands within; each further step is a signal, too.
static void stepping(void) {
    struct sigaction action = {.sa_sigaction = step, .sa_flags = SA_SIGINFO};
    sigaction(SIGTRAP, &action, NULL);
    for (int shape = 0; shape < shapes(); shape++)
        for (wanted = 0; wanted < BOUNDARIES; wanted++) {
            stepped = copy_of(shape, 1 + wanted);
            if (!stepped->boundaries[wanted])
                continue;
            arrived = steps = 0;
            struct registers out = call_with(stepped->boundaries[0], 0x100);
            print("stepped", shape, wanted, out);
            printf("arrived %d, some steps %d\n", arrived, steps > 2);
            // All that was rewritten is stepped through once more.
            print("again", shape, wanted, call_with(stepped->boundaries[0], 0x100));
        }
}

static pthread_barrier_t barrier;
static volatile int ticks;

static void tick(int signal) {
    (void)signal;
    ticks++;
    call_with(copy_of(ticks % shapes(), 7)->boundaries[0], 0);
}

// What each entry gives is known before: nothing is rewritten yet when threads begin to compare.
static struct registers expected[64][BOUNDARIES];

static void *hammer(void *seed_at) {
    uint64_t seed = (uintptr_t)seed_at, wrong = 0;
    pthread_barrier_wait(&barrier);
    for (int i = 0; i < 60000; i++) {
        seed = seed * 6364136223846793005 + 1442695040888963407;
        int shape = (seed >> 33) % shapes(), boundary = (seed >> 45) % BOUNDARIES;
        if (!copy_of(shape, 6)->boundaries[boundary])
            boundary = 0;
        struct registers out = call_with(copy_of(shape, 6)->boundaries[boundary], 0);
        if (memcmp(&out, &expected[shape][boundary], sizeof out)) {
            print("expected", shape, boundary, expected[shape][boundary]);
            print("but came", shape, boundary, out);
            wrong++;
        }
    }
    return (void *)(uintptr_t)wrong;
}

static void hammering(void) {
    enum { THREADS = 4 };
    for (int shape = 0; shape < shapes(); shape++)
        for (int boundary = 0; boundary < BOUNDARIES; boundary++)
            if (copy_of(shape, 6)->boundaries[boundary])
                expected[shape][boundary] = call_with(copy_of(shape, 6)->boundaries[boundary], 0);
    struct sigaction action = {.sa_handler = tick, .sa_flags = SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval often = {{0, 500}, {0, 500}};
    setitimer(ITIMER_REAL, &often, NULL);
    pthread_t threads[THREADS];
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (uintptr_t i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, hammer, (void *)(i + 1));
    for (int i = 0; i < THREADS; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        printf("%lu wrong\n", (uintptr_t)wrong);
    }
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOFBF, 1 << 20);
    file = memfd_create("file", 0);
    if (argc > 1 && !strcmp(argv[1], "entries"))
        entries();
    else if (argc > 1 && !strcmp(argv[1], "stepping"))
        stepping();
    else
        hammering();
    return 0;
}
