/* Resuming from signal handlers; masks, alternate stacks and nested handlers come back. */
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include "check.h"

static orrery_rollback_snapshot_t start;
static volatile int next_value;
static sigjmp_buf outside;
/* No page is there. Not null: a sanitizer would take the fault from the handler. */
static int *volatile nowhere = (int *)64;

static void resumes(int signal) {
    (void)signal;
    orrery_rollback_resume(start, next_value);
    CHECK(0);
}

static void raises(int signal) {
    (void)signal;
    raise(SIGUSR1);
    CHECK(0);
}

static void refused(int signal) {
    (void)signal;
    orrery_rollback_snapshot_t id = 5;
    CHECK_ERROR(orrery_rollback_snapshot(&id), ENOTSUP);
    CHECK(id == 5);
}

static void snaps(int signal) {
    orrery_rollback_snapshot_t inner = 0;
    volatile int mine = signal;
    int got = orrery_rollback_snapshot(&inner);
    CHECK(got >= 0 && mine == signal);
    mine = 0;
    if (got < 3) {
        orrery_rollback_resume(inner, got + 1);
        CHECK(0);
    }
    CHECK(orrery_rollback_discard(inner) == 0);
}

static void leaves(int signal) { siglongjmp(outside, signal); }

static void on(int signal, void (*handler)(int), int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = flags;
    CHECK(sigaction(signal, &action, NULL) == 0);
}

static void check_mask(void) {
    sigset_t mask;
    CHECK(sigprocmask(SIG_SETMASK, NULL, &mask) == 0);
    for (int signal = 1; signal < 32; signal++)
        CHECK(sigismember(&mask, signal) == (signal == SIGTERM));
}

int main(void) {
    static char stack[1 << 16];
    stack_t alternate;
    memset(&alternate, 0, sizeof alternate);
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    CHECK(sigprocmask(SIG_SETMASK, &mask, NULL) == 0);
    on(SIGUSR1, resumes, 0);
    on(SIGUSR2, raises, 0);
    on(SIGSEGV, resumes, 0);
    on(SIGALRM, resumes, SA_ONSTACK);
    on(SIGHUP, refused, SA_ONSTACK);
    on(SIGINT, snaps, 0);
    on(SIGQUIT, leaves, 0);
    CHECK(sigaltstack(&alternate, NULL) == 0);
    int got = orrery_rollback_snapshot(&start);
    CHECK(got >= 0);
    check_mask();
    stack_t now;
    CHECK(sigaltstack(NULL, &now) == 0 && now.ss_sp == stack && now.ss_flags == 0);
    next_value = got + 1;
    switch (got) {
    case 0:
        raise(SIGUSR1);
        break;
    case 1: /* A handler in a handler. */
        raise(SIGUSR2);
        break;
    case 2: /* A fault. */
        *nowhere = 1;
        break;
    case 3: /* On the alternate stack. */
        raise(SIGALRM);
        break;
    case 4: /* Again: the alternate stack is not taken for used. */
        raise(SIGALRM);
        break;
    case 5: /* Pending signals are forgotten. */
        sigaddset(&mask, SIGUSR1);
        sigprocmask(SIG_SETMASK, &mask, NULL);
        raise(SIGUSR1);
        resumes(0);
        break;
    case 6:
        raise(SIGHUP);
        raise(SIGINT);
        raise(SIGINT);
        if (sigsetjmp(outside, 1) == 0) {
            raise(SIGQUIT);
            CHECK(0);
        }
        check_mask();
        raise(SIGUSR1);
        break;
    default:
        return 0;
    }
    CHECK(0);
}
