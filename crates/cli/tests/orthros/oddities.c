/*
 * A service of processes that each have something unusual. When /run/ask appears it writes what each sees to /run/state, a line for each.
 * The first process runs a program without a name, in a directory without a name.
 */
#define _GNU_SOURCE
#include <asm/ldt.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <mqueue.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PR_SET_SYSCALL_USER_DISPATCH
#define PR_SET_SYSCALL_USER_DISPATCH 59
#endif

/* What a process holds. */
static int held;
static char *memory;
static char text[200];

static void must(long result, const char *what) {
    if (result < 0) {
        perror(what);
        _exit(1);
    }
}

/* What a descriptor leads to, without the number of a socket. */
static const char *target(void) {
    static char link[200];
    char path[60];
    ssize_t length;

    snprintf(path, sizeof path, "/proc/self/fd/%d", held);
    length = readlink(path, link, sizeof link - 1);
    link[length < 0 ? 0 : length] = 0;
    if (!strncmp(link, "socket:", 7))
        strcpy(link, "socket");
    return link;
}

static void look_at_target(void) { strcpy(text, target()); }

static void enter_nameless(void) {
    must(mkdir("/tmp/left", 0700), "mkdir");
    must(chdir("/tmp/left"), "chdir");
    must(rmdir("/tmp/left"), "rmdir");
}

static void look_around(void) {
    char path[200];

    strcpy(text, getcwd(path, sizeof path) ? path : strerror(errno));
}

static void enter_bytes(void) {
    must(mkdir("/tmp/\xff\xfe", 0700), "mkdir");
    must(chdir("/tmp/\xff\xfe"), "chdir");
    held = open("/tmp/\xff\xfe/\xfd", O_CREAT | O_RDWR, 0600);
    must(write(held, "bytes", 5), "write");
}

static void look_at_bytes(void) {
    char bytes[6] = "", path[200] = "";
    int is_same = getcwd(path, sizeof path) && !strcmp(path, "/tmp/\xff\xfe");

    pread(held, bytes, 5, 0);
    snprintf(text, sizeof text, "%s %d %d", bytes, is_same, access("\xfd", F_OK));
}

static void map_nameless(void) {
    held = open("/dev/shm", O_TMPFILE | O_RDWR, 0600);
    must(ftruncate(held, 8192), "ftruncate");
    memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, held, 0);
    strcpy(memory, "arena");
}

static void look_at_mapping(void) {
    char bytes[6] = "";

    memory[4096]++;
    pread(held, bytes, 5, 0);
    must(pwrite(held, "x", 1, 4097), "pwrite");
    snprintf(text, sizeof text, "%s %s %c", memory, bytes, memory[4097]);
}

static void open_nameless_directory(void) {
    must(mkdir("/tmp/removed", 0700), "mkdir");
    held = open("/tmp/removed", O_DIRECTORY);
    must(rmdir("/tmp/removed"), "rmdir");
}

static void open_nameless_pipe(void) {
    must(mkfifo("/tmp/fifo", 0600), "mkfifo");
    held = open("/tmp/fifo", O_RDWR | O_NONBLOCK);
    unlink("/tmp/fifo");
}

static void look_into_pipe(void) {
    char bytes[6] = "";
    ssize_t length = read(held, bytes, 5);

    snprintf(text, sizeof text, "%s %s", target(), length > 0 ? bytes : "piped");
    must(write(held, "piped", 5), "write");
}

static void run_memfd(void) {
    int program = memfd_create("program", 0), own = open("/proc/self/exe", O_RDONLY);
    char *arguments[] = {"child", NULL}, *environment[] = {NULL}, bytes[4096];
    ssize_t length;

    while ((length = read(own, bytes, sizeof bytes)) > 0)
        must(write(program, bytes, (size_t)length), "write");
    held = fork();
    if (held)
        return;
    fexecve(program, arguments, environment);
    _exit(1);
}

static void look_at_child(void) {
    char path[60], link[100] = "";

    snprintf(path, sizeof path, "/proc/%d/exe", held);
    if (readlink(path, link, sizeof link - 1) < 0)
        strcpy(link, "none");
    snprintf(text, sizeof text, "%s %d", link, waitpid(held, NULL, WNOHANG));
}

static void limit_files(void) {
    struct rlimit limits = {0, 0};

    must(setrlimit(RLIMIT_FSIZE, &limits), "setrlimit");
}

static void look_at_limit(void) {
    struct rlimit limits;

    getrlimit(RLIMIT_FSIZE, &limits);
    snprintf(text, sizeof text, "%lu %lu", (unsigned long)limits.rlim_cur, (unsigned long)limits.rlim_max);
}

static char selector;
static volatile sig_atomic_t dispatched;

static void on_dispatch(int signal) {
    (void)signal;
    selector = 0;
    dispatched++;
}

static void dispatch(void) {
    signal(SIGSYS, on_dispatch);
    must(prctl(PR_SET_SYSCALL_USER_DISPATCH, 1, 0, 0, &selector), "prctl");
}

static void look_at_dispatch(void) {
    dispatched = 0;
    selector = 1;
    syscall(SYS_getpid);
    selector = 0;
    snprintf(text, sizeof text, "%d", (int)dispatched);
}

static void reset_on_fork(void) {
    struct sched_param parameters = {0};

    must(sched_setscheduler(0, SCHED_BATCH | SCHED_RESET_ON_FORK, &parameters), "sched_setscheduler");
}

static void look_at_policy(void) { snprintf(text, sizeof text, "%x", (unsigned)sched_getscheduler(0)); }

static void look_at_gone_process(void) {
    char path[60];
    int child = fork();

    if (!child)
        pause();
    snprintf(path, sizeof path, "/proc/%d/stat", child);
    held = open(path, O_RDONLY);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static void look_whether_proc(void) { strcpy(text, strncmp(target(), "/proc/", 6) ? target() : "proc"); }

static void open_namespace(void) { held = open("/proc/self/ns/net", O_RDONLY); }

static void look_whether_namespace(void) { strcpy(text, strncmp(target(), "net:", 4) ? target() : "net"); }

static void open_queue(void) { held = mq_open("/queue", O_CREAT | O_RDWR, 0600, NULL); }

static void unmount(void) {
    must(mkdir("/tmp/lazy", 0700), "mkdir");
    must(mount("none", "/tmp/lazy", "tmpfs", 0, NULL), "mount");
    held = open("/tmp/lazy", O_DIRECTORY);
    must(umount2("/tmp/lazy", MNT_DETACH), "umount2");
}

static int is_restricted;

static void restrict_by_landlock(void) {
    struct landlock_ruleset_attr rules = {.handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_REG};
    long ruleset = syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0);

    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    is_restricted = syscall(SYS_landlock_restrict_self, ruleset, 0) == 0;
    close((int)ruleset);
}

static void look_what_is_allowed(void) {
    int file = is_restricted ? open("/tmp/made", O_CREAT | O_RDWR, 0600) : -1;

    strcpy(text, file >= 0 ? "may make files" : "may not");
}

static void make_segment(void) {
    struct user_desc segment = {.entry_number = 1, .limit = 4095, .seg_32bit = 1};

    must(syscall(SYS_modify_ldt, 1, &segment, sizeof segment), "modify_ldt");
}

static void look_at_segment(void) {
    char entries[16] = "";

    snprintf(text, sizeof text, "%ld", syscall(SYS_modify_ldt, 0, entries, sizeof entries));
}

static void trace(void) {
    held = fork();
    if (!held) {
        for (;;)
            usleep(10000);
    }
    must(ptrace(PTRACE_SEIZE, held, 0, PTRACE_O_EXITKILL), "ptrace");
}

static void look_at_tracee(void) {
    int status = 0;
    int ended = waitpid(held, &status, WNOHANG | __WALL);

    snprintf(text, sizeof text, "%s", ended == held && WIFSIGNALED(status) ? "killed" : "traced");
}

static void open_port(void) { must(ioperm(0x80, 1, 1), "ioperm"); }

static void look_at_port(void) {
    int status, child = fork();

    if (!child) {
        outb(0, 0x80);
        _exit(0);
    }
    waitpid(child, &status, 0);
    strcpy(text, WIFSIGNALED(status) ? "closed" : "open");
}

static const struct {
    const char *name;
    void (*set)(void);
    void (*look)(void);
} CASES[] = {
    {"working directory", enter_nameless, look_around},
    {"bytes", enter_bytes, look_at_bytes},
    {"mapping", map_nameless, look_at_mapping},
    {"directory", open_nameless_directory, look_at_target},
    {"pipe", open_nameless_pipe, look_into_pipe},
    {"program", run_memfd, look_at_child},
    {"limit", limit_files, look_at_limit},
    {"dispatch", dispatch, look_at_dispatch},
    {"policy", reset_on_fork, look_at_policy},
    {"gone process", look_at_gone_process, look_whether_proc},
    {"namespace", open_namespace, look_whether_namespace},
    {"queue", open_queue, look_at_target},
    {"unmounted", unmount, look_at_target},
    {"landlock", restrict_by_landlock, look_what_is_allowed},
    {"segment", make_segment, look_at_segment},
    {"tracee", trace, look_at_tracee},
    {"port", open_port, look_at_port},
};
enum { COUNT = sizeof CASES / sizeof *CASES };

/* Answers each byte with what it sees. */
static void serve(int number, int questions, int answers) {
    char byte;

    CASES[number].set();
    while (read(questions, &byte, 1) == 1) {
        memset(text, 0, sizeof text);
        CASES[number].look();
        if (write(answers, text, sizeof text) != sizeof text)
            break;
    }
    _exit(1);
}

int main(int count, char **arguments) {
    static int questions[COUNT][2], answers[COUNT][2];

    if (count && !strcmp(arguments[0], "child")) {
        for (;;)
            pause();
    }
    if (count && strcmp(arguments[0], "service")) {
        char *again[] = {"service", NULL}, *environment[] = {NULL}, bytes[4096];
        int program = memfd_create("service", MFD_CLOEXEC), own = open("/proc/self/exe", O_RDONLY);
        ssize_t length;

        while ((length = read(own, bytes, sizeof bytes)) > 0)
            must(write(program, bytes, (size_t)length), "write");
        fexecve(program, again, environment);
        must(-1, "fexecve");
    }
    signal(SIGPIPE, SIG_IGN);
    for (int number = 0; number < COUNT; number++) {
        must(pipe2(questions[number], O_CLOEXEC), "pipe2");
        must(pipe2(answers[number], O_CLOEXEC), "pipe2");
        if (!fork()) {
            for (int other = 0; other <= number; other++) {
                close(questions[other][1]);
                close(answers[other][0]);
            }
            serve(number, questions[number][0], answers[number][1]);
        }
        close(questions[number][0]);
        close(answers[number][1]);
    }
    must(mkdir("/tmp/own", 0700), "mkdir");
    must(chdir("/tmp/own"), "chdir");
    must(rmdir("/tmp/own"), "rmdir");
    for (;;) {
        FILE *state;

        usleep(20000);
        if (access("/run/ask", F_OK))
            continue;
        state = fopen("/run/state", "w");
        for (int number = 0; number < COUNT; number++) {
            char answer[sizeof text] = "";

            if (write(questions[number][1], "?", 1) != 1 ||
                read(answers[number][0], answer, sizeof answer) != sizeof answer)
                strcpy(answer, "has ended");
            fprintf(state, "%s: %s\n", CASES[number].name, answer);
        }
        fclose(state);
        unlink("/run/ask");
    }
}
