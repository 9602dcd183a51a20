// Calls at places of each kind, each made between two marks, for a tracer that steps from one to the other and has signals
// arrive on the way: steps STACK. Counts, and tells of, what a handler saw of the program that it should not have seen, and what
// a call changed that it should not have changed.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

// What a handler does.
enum { RETURN, LEAVE, CHANGE };
enum { BEGIN = 1, END = 2, FORCED = 0x5eed };

// Read and written by the tracer: words, in this order.
static volatile struct {
    uint64_t what;    // what handlers do
    uint64_t again;   // whether the call is to be made once more
    uint64_t busy;    // whether handlers make calls of their own
    uint64_t lax;     // whether flags may be shown as they are just then
    uint64_t wrong;   // how much was wrong
    uint64_t handled; // how many signals were handled
    uint64_t hidden;  // of these, how many saw something else than the program
    uint64_t shown;   // and how many saw the call: before, behind, or on the way there
    char complaint[256];
} state;

enum { RAX, RBX, RCX, RDX, RSI, RDI, RBP, R8, R9, R10, R12, R13, R14, R15, FLAGS, GENERAL };
enum { MARKS = 14, WIDE = 16, ARITHMETIC = 0xcd5 };
static const char *const NAMES[] = {"rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp",  "r8",
                                    "r9",  "r10", "r12", "r13", "r14", "r15", "flags"};
static const int PLACES_OF[] = {REG_RAX, REG_RBX, REG_RCX, REG_RDX, REG_RSI, REG_RDI, REG_RBP, REG_R8,
                                REG_R9,  REG_R10, REG_R12, REG_R13, REG_R14, REG_R15, REG_EFL};

struct registers {
    uint64_t general[GENERAL];
    uint64_t zone[MARKS];
    unsigned char wide[WIDE][32];
    uint32_t control;
    uint16_t x87;
};
_Static_assert(offsetof(struct registers, zone) == 120, "as the assembly has it");
_Static_assert(offsetof(struct registers, wide) == 232, "as the assembly has it");
_Static_assert(offsetof(struct registers, control) == 744, "as the assembly has it");

struct place {
    unsigned char *start, *call, *end;
};

__asm__(".data\n"
        "flag: .quad 0\n"
        ".section .data.places, \"aw\"\n"
        "places:\n"
        ".text\n"
        // Nothing before the first instruction can be moved: it is a jump.
        ".macro place first, second, third\n"
        "  .skip 128, 0x90\n"
        "  jmp 60f\n"
        "  60: \\first\n"
        "  \\second\n"
        "  \\third\n"
        "  61: syscall\n"
        "  62: ret\n"
        "  .pushsection .data.places, \"aw\"; .quad 60b, 61b, 62b; .popsection\n"
        ".endm\n"
        "place \"mov $0, %eax\"\n"
        "place \"cmpb $0, flag(%rip)\", \"jne 62f\", \"xor %eax, %eax\"\n"
        "place \"mov 8(%rsp), %r9\"\n"
        "place \"mov %r8, %rsi\", \"mov %r9, %rdi\"\n"
        "place \"testb $1, flag(%rip)\", \"jne 62f\", \"mov %r10d, %eax\"\n"
        "place \"mov %r8, %rsi\", \"mov %rcx, %rdi\"\n" // Stays with dispatch: rcx is read within.
        "place \"mov $2, %eax\"\n"
        "place \"mov $4, %eax\"\n"
        "place \"mov $14, %eax\"\n"
        "place \"mov $13, %eax\"\n"
        "place \"mov $9, %eax\"\n"
        "place \"mov $271, %eax\"\n"
        "place \"mov $39, %eax\"\n"
        "place \"mov $131, %eax\"\n"
        "place \"mov $35, %eax\"\n"
        "place \"mov $2, %eax\"\n"
        // At so many bytes before the end of a page.
        ".macro before_end distance\n"
        "  .balign 4096, 0x90\n"
        "  .skip 4096 - 2 - \\distance, 0x90\n"
        "  jmp 60f\n"
        "  60: mov $0, %eax\n"
        "  61: syscall\n"
        "  62: ret\n"
        "  .pushsection .data.places, \"aw\"; .quad 60b, 61b, 62b; .popsection\n"
        ".endm\n"
        "before_end 7\n"
        "before_end 6\n"
        "before_end 3\n"
        ".rept 48\n"
        "place \"mov $0, %eax\"\n"
        ".endr\n"
        ".section .data.places, \"aw\"\n"
        "places_end:\n"
        ".text\n");
extern struct place places[], places_end[];

// Loads registers, makes the call at `from`, stores registers. What the stack pointer is there, `at` is told.
void enter(void *from, const struct registers *in, struct registers *out, uint64_t *at);
extern const char __executable_start[], etext[];
__asm__(".text\n"
        ".balign 16\n"
        "enter:\n"
        "push %rbx; push %rbp; push %r12; push %r13; push %r14; push %r15\n"
        "push %rdx\n"
        "mov %rdi, %r11\n"
        "pushq 64(%rsi)\n" // 8(%rsp) for the place, and what r9 is.
        "lea 1f(%rip), %rax\n"
        "push %rax\n"
        "mov %rsp, (%rcx)\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13\n"
        "mov 120 + 8 * \\n(%rsi), %rax\n"
        "mov %rax, -8 - 8 * \\n(%rsp)\n"
        ".endr\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
        "vmovdqu 232 + 32 * \\n(%rsi), %ymm\\n\n"
        ".endr\n"
        "ldmxcsr 744(%rsi)\n"
        "fldcw 748(%rsi)\n"
        "lea -128(%rsp), %rsp\n"
        "pushq 112(%rsi)\n"
        "popfq\n"
        "lea 128(%rsp), %rsp\n"
        "mov (%rsi), %rax; mov 8(%rsi), %rbx; mov 16(%rsi), %rcx; mov 24(%rsi), %rdx\n"
        "mov 40(%rsi), %rdi; mov 48(%rsi), %rbp; mov 56(%rsi), %r8; mov 64(%rsi), %r9; mov 72(%rsi), %r10\n"
        "mov 80(%rsi), %r12; mov 88(%rsi), %r13; mov 96(%rsi), %r14; mov 104(%rsi), %r15\n"
        "mov 32(%rsi), %rsi\n"
        "jmp *%r11\n"
        "1:\n"
        "mov 8(%rsp), %r11\n"
        "mov %rax, (%r11); mov %rbx, 8(%r11); mov %rcx, 16(%r11); mov %rdx, 24(%r11); mov %rsi, 32(%r11)\n"
        "mov %rdi, 40(%r11); mov %rbp, 48(%r11); mov %r8, 56(%r11); mov %r9, 64(%r11); mov %r10, 72(%r11)\n"
        "mov %r12, 80(%r11); mov %r13, 88(%r11); mov %r14, 96(%r11); mov %r15, 104(%r11)\n"
        "pushfq\n"
        "pop %rax\n"
        "mov %rax, 112(%r11)\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13\n"
        "mov -16 - 8 * \\n(%rsp), %rax\n"
        "mov %rax, 120 + 8 * \\n(%r11)\n"
        ".endr\n"
        ".irp n, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n"
        "vmovdqu %ymm\\n, 232 + 32 * \\n(%r11)\n"
        ".endr\n"
        "stmxcsr 744(%r11)\n"
        "fnstcw 748(%r11)\n"
        "lea 16(%rsp), %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbp; pop %rbx\n"
        "cld\n"
        "ret\n");

static struct registers in, out;
static struct place *place;
static uint64_t at;
static volatile int changed, depth;
static sigjmp_buf back;

__attribute__((format(printf, 1, 2))) static void wrong(const char *format, ...) {
    va_list arguments;
    __builtin_va_start(arguments, format);
    vsnprintf((char *)state.complaint, sizeof state.complaint, format, arguments);
    __builtin_va_end(arguments);
    state.wrong++;
}

// What the call takes and gives.
struct kind {
    const char *name;
    int place;
    long number;
    void (*prepare)(void);
    // What it has to return, once everything was looked at. `made`: how often it may have been made.
    void (*check)(long result, int least, int most);
    // How often it is called before.
    int warm;
};

static int file;
static char byte[8];
static uint64_t mask[1], old_mask[1];

static void reads(void) {
    lseek(file, 0, SEEK_SET);
    in.general[RDI] = (uint64_t)file;
    in.general[RSI] = (uintptr_t)byte;
    in.general[RDX] = 1;
    // Some places load these from there.
    in.general[R8] = in.general[RSI];
    in.general[R9] = in.general[RDI];
    in.general[RCX] = in.general[RDI];
    in.general[R10] = 0;
}

static void is_read(long result, int least, int most) {
    long count = lseek(file, 0, SEEK_CUR);
    if (count < least || count > most)
        wrong("read %ld times, and not %d to %d", count, least, most);
    if (!changed && least && result != 1)
        wrong("read gave %ld", result);
}

static void opens_nothing(void) {
    in.general[RDI] = (uintptr_t) "/nowhere/to/be/found";
    in.general[RSI] = O_RDONLY;
}
static void is_nothing(long result, int least, int most) {
    (void)most;
    if (!changed && least && result != -ENOENT)
        wrong("a path that is not there gave %ld", result);
}

static struct stat about;
static void looks(void) {
    about.st_mode = 0;
    in.general[RDI] = (uintptr_t) "/dev/null";
    in.general[RSI] = (uintptr_t)&about;
}
static void is_seen(long result, int least, int most) {
    (void)most;
    if (least && ((!changed && result) || !S_ISCHR(about.st_mode)))
        wrong("stat gave %ld", result);
}

// Opens a file that a rule of the tracer's policy may be about, which has it fail.
static void opens_denied(void) {
    in.general[RDI] = (uintptr_t) "/dev/denied";
    in.general[RSI] = O_RDONLY;
}

static void masks(void) {
    mask[0] = 1UL << (SIGTERM - 1) | 1UL << (SIGSYS - 1);
    old_mask[0] = 77;
    in.general[RDI] = SIG_BLOCK;
    in.general[RSI] = (uintptr_t)mask;
    in.general[RDX] = (uintptr_t)old_mask;
    in.general[R10] = 8;
}
static void is_masked(long result, int least, int most) {
    (void)most;
    sigset_t now;
    sigprocmask(SIG_SETMASK, NULL, &now);
    // Who leaves a handler takes the mask along that was there before.
    if (least && !changed && (result || old_mask[0] || !sigismember(&now, SIGTERM)))
        wrong("rt_sigprocmask gave %ld, before %lx, blocked %d", result, old_mask[0],
              sigismember(&now, SIGTERM));
    sigemptyset(&now);
    sigprocmask(SIG_SETMASK, &now, NULL);
}

static uint64_t action[4], old_action[4];
static void asks_for_action(void) {
    action[0] = (uintptr_t)SIG_IGN;
    old_action[0] = 77;
    in.general[RDI] = SIGTERM;
    in.general[RSI] = (uintptr_t)action;
    in.general[RDX] = (uintptr_t)old_action;
    in.general[R10] = 8;
}
static void is_action(long result, int least, int most) {
    (void)most;
    if (least && !changed && (result || old_action[0] == 77))
        wrong("rt_sigaction gave %ld", result);
}

static void maps(void) {
    in.general[RDI] = 0;
    in.general[RSI] = 4096;
    in.general[RDX] = PROT_READ;
    in.general[R10] = MAP_PRIVATE | MAP_ANONYMOUS;
    in.general[R8] = (uint64_t)-1;
    in.general[R9] = 0;
}
static void is_mapped(long result, int least, int most) {
    (void)most;
    if (changed || !least)
        return;
    char *mapped = NULL;
    memcpy(&mapped, &result, sizeof mapped);
    if (result < 4096 || *mapped || munmap(mapped, 4096))
        wrong("mmap gave %lx", result);
}

static struct timespec none;
static void polls(void) {
    mask[0] = 1UL << (SIGTERM - 1) | 1UL << (SIGSYS - 1);
    none = (struct timespec){0, 0};
    in.general[RDI] = 0;
    in.general[RSI] = 0;
    in.general[RDX] = (uintptr_t)&none;
    in.general[R10] = (uintptr_t)mask;
    in.general[R8] = 8;
}
static void is_zero(long result, int least, int most) {
    (void)most;
    if (!changed && least && result)
        wrong("gave %ld", result);
}

static void nothing(void) {}
static void is_pid(long result, int least, int most) {
    (void)most;
    if (!changed && least && result != getpid())
        wrong("getpid gave %ld", result);
}

static stack_t stack_was;
static void asks_for_stack(void) {
    in.general[RDI] = 0;
    in.general[RSI] = (uintptr_t)&stack_was;
}

static struct timespec moment;
static void sleeps(void) {
    moment = (struct timespec){0, 1};
    in.general[RDI] = (uintptr_t)&moment;
    in.general[RSI] = 0;
}

enum { CMPB = 1, ANY, LANDING, BRANCH, STAYS, FRESH = 19, DISPATCHED = 15, HOT = 60 };
static const struct kind KINDS[] = {
    {"mov", 0, SYS_read, reads, is_read, HOT},
    {"cmpb", CMPB, SYS_read, reads, is_read, HOT},
    {"any number", ANY, SYS_read, reads, is_read, HOT},
    {"any number, treated", ANY, SYS_rt_sigprocmask, masks, is_masked, HOT},
    {"jump pad", LANDING, SYS_read, reads, is_read, HOT},
    {"branch", BRANCH, SYS_read, reads, is_read, HOT},
    {"dispatched", STAYS, SYS_read, reads, is_read, HOT},
    {"open", 6, SYS_open, opens_nothing, is_nothing, HOT},
    {"open, any number", ANY, SYS_open, opens_nothing, is_nothing, 0},
    {"stat", 7, SYS_stat, looks, is_seen, HOT},
    {"open, denied", 15, SYS_open, opens_denied, is_nothing, HOT},
    {"rt_sigprocmask", 8, SYS_rt_sigprocmask, masks, is_masked, HOT},
    {"rt_sigaction", 9, SYS_rt_sigaction, asks_for_action, is_action, HOT},
    {"mmap", 10, SYS_mmap, maps, is_mapped, HOT},
    {"ppoll", 11, SYS_ppoll, polls, is_zero, HOT},
    {"getpid", 12, SYS_getpid, nothing, is_pid, HOT},
    {"sigaltstack", 13, SYS_sigaltstack, asks_for_stack, is_zero, HOT},
    {"nanosleep", 14, SYS_nanosleep, sleeps, is_zero, HOT},
    {"at the end of a page", 16, SYS_read, reads, is_read, HOT},
    {"across the end of a page", 17, SYS_read, reads, is_read, HOT},
    {"behind the end of a page", 18, SYS_read, reads, is_read, HOT},
    {"rewritten", FRESH, SYS_read, reads, is_read, DISPATCHED},
};
enum { MANY = sizeof KINDS / sizeof *KINDS };
static const struct kind *kind;

// Compares what a handler sees with what the call began with.
static void see(ucontext_t *context) {
    greg_t *r = context->uc_mcontext.gregs;
    unsigned char *rip = (unsigned char *)r[REG_RIP];
    int before = rip == place->call, behind = rip == place->end,
        within = rip >= place->start && rip < place->call;
    if (!before && !behind && !within) {
        // The rest of the program is to be seen as well.
        state.hidden += (const char *)rip < __executable_start || (const char *)rip >= etext;
        return;
    }
    state.shown++;
    if ((uint64_t)r[REG_RSP] != at)
        wrong("the stack pointer is off by %ld", (long)((uint64_t)r[REG_RSP] - at));
    for (int i = 0; i < GENERAL; i++) {
        uint64_t seen = (uint64_t)r[PLACES_OF[i]];
        // The call's result, and what its instruction leaves in rcx, are told from it being made.
        if ((i == RAX && behind) || (i == RCX && !within))
            continue;
        // Whoever stands within the place may have gone some of the way to the number.
        uint64_t expected = i == RAX && before ? (uint64_t)kind->number : in.general[i];
        if (i == RAX     ? seen != expected && !(within && seen == (uint64_t)kind->number)
            : i == FLAGS ? !state.lax && ((seen ^ expected) & ARITHMETIC) != 0
                         : seen != expected)
            wrong("%s is %lx, and not %lx, %s", NAMES[i], seen, expected,
                  before   ? "before the call"
                  : behind ? "behind the call"
                           : "within the place");
    }
    if (state.what == CHANGE) {
        r[REG_RIP] = (greg_t)place->end;
        r[REG_RAX] = FORCED;
        changed = 1;
    }
}

static void handle(int signal, siginfo_t *info, void *context) {
    (void)info;
    int saved = errno;
    state.handled++;
    // The second of two signals interrupts the first one's handler, or what leads there.
    if (depth++ == 0 && signal == SIGUSR1)
        see(context);
    if (state.busy) {
        syscall(SYS_getpgrp);
        if (getppid() <= 0)
            wrong("getppid in a handler of %d", signal);
    }
    depth--;
    errno = saved;
    if (state.what == LEAVE)
        siglongjmp(back, 1);
}

static void mark(long which) {
    __asm__ volatile("int3" : : "a"(which), "D"(&state), "S"(kind->name) : "memory");
}

static void compare(void) {
    for (int i = 0; i < GENERAL; i++)
        if (i != RAX && i != RCX && !(i == FLAGS && changed && state.lax) &&
            (i == FLAGS ? (in.general[i] ^ out.general[i]) & ARITHMETIC : in.general[i] != out.general[i]))
            wrong("%s was %lx and is %lx", NAMES[i], in.general[i], out.general[i]);
    if (memcmp(in.zone, out.zone, sizeof in.zone))
        wrong("the red zone is another one");
    if (memcmp(in.wide, out.wide, sizeof in.wide))
        wrong("wide registers are others");
    if (in.control != out.control || in.x87 != out.x87)
        wrong("control words are %x and %x", out.control, out.x87);
}

// What the call begins with.
static void fill(void) {
    for (int i = 0; i < GENERAL; i++)
        in.general[i] = 0x1111111111111111u * (unsigned)(i + 1);
    // Carry, parity, zero and overflow are set; or what a comparison of the place's own makes of them.
    in.general[FLAGS] = kind->place == CMPB || kind->place == BRANCH ? 0x46 : 0x847;
    for (int i = 0; i < MARKS; i++)
        in.zone[i] = 0xfedcba9876543210u + (unsigned)i;
    for (int i = 0; i < WIDE; i++)
        memset(in.wide[i], 0x40 + i, sizeof in.wide[i]);
    // All exceptions masked, rounding up; the x87's likewise.
    in.control = 0x5f80;
    in.x87 = 0x0b7f;
    kind->prepare();
    if (kind->place == ANY || kind->place == LANDING || kind->place == STAYS)
        in.general[RAX] = (uint64_t)kind->number;
}

static void call(void) {
    fill();
    enter(place->start, &in, &out, &at);
}

static void make(void) {
    static struct place *fresh;
    if (!fresh)
        fresh = &places[FRESH];
    uint64_t canary[64];
    do {
        place = kind->place == FRESH ? fresh++ : &places[kind->place];
        if (place >= places_end)
            exit(3);
        uint64_t wanted = state.what;
        state.what = RETURN;
        for (int i = 0; i < (kind->place == FRESH ? kind->warm : 0); i++)
            call();
        state.what = wanted;
        memset(canary, 0x77, sizeof canary);
        memset(&out, 0, sizeof out);
        changed = depth = 0;
        volatile int left = 0;
        fill();
        if (sigsetjmp(back, 1) == 0) {
            mark(BEGIN);
            enter(place->start, &in, &out, &at);
        } else {
            left = 1;
        }
        mark(END);
        state.what = RETURN;
        if (!left)
            compare();
        for (unsigned i = 0; i < sizeof canary / sizeof *canary; i++)
            if (canary[i] != 0x7777777777777777u)
                wrong("the stack is another one");
        if (changed && out.general[RAX] != FORCED)
            wrong("a changed call gave %lx", out.general[RAX]);
        kind->check((long)out.general[RAX], !left && !changed, 1);
    } while (state.again);
}

int main(int count, char **words) {
    enum { SMALL = 24 << 10, ROOMY = 64 << 10 };
    static char alternate[ROOMY] __attribute__((aligned(16)));
    if (count != 2)
        return 2;
    setvbuf(stdout, NULL, _IONBF, 0);
    file = memfd_create("file", 0);
    if (write(file, "abcdefgh", 8) != 8)
        return 2;
    stack_t own = {.ss_sp = alternate, .ss_size = strcmp(words[1], "roomy") ? SMALL : ROOMY};
    int on_it = strcmp(words[1], "own") != 0;
    if (on_it && sigaltstack(&own, NULL))
        return 2;
    struct sigaction action = {.sa_sigaction = handle,
                               .sa_flags = SA_SIGINFO | SA_RESTART | (on_it ? SA_ONSTACK : 0)};
    sigaction(SIGUSR1, &action, NULL);
    sigaction(SIGUSR2, &action, NULL);
    for (int i = 0; i < MANY; i++) {
        kind = &KINDS[i];
        place = &places[kind->place];
        for (int n = 0; n < kind->warm && kind->place != FRESH; n++)
            call();
        is_masked(0, 0, 0);
        // The C library's own places, too.
        for (int n = 0; n < HOT; n++)
            syscall(SYS_getpgrp), (void)getppid();
    }
    printf("%d\n", getpid());
    char ready;
    if (read(0, &ready, 1) != 1)
        return 2;
    for (int i = 0; i < MANY; i++) {
        kind = &KINDS[i];
        make();
    }
    printf("%lu signals, %lu at the call, %lu hidden, %lu wrong %s\n", state.handled, state.shown,
           state.hidden, state.wrong, state.complaint);
    return 0;
}
