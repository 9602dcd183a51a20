/*
 * What an attacker would run in a worker of nginx, preloaded into it. When the file $INTRUDER/go appears and the process is an
 * ordinary user's, it
 *
 *   - writes all its readable memory to $INTRUDER/memory, as an over-read without bounds would;
 *   - tries to get at the processes whose numbers are in $INTRUDER/go, and at the file $INTRUDER/key;
 *
 * and writes what came of it to $INTRUDER/report, a line for each way: its name, the process, and "in" or errno.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[256];
static int done;

__attribute__((constructor)) static void begin(void) {
    snprintf(folder, sizeof folder, "%s", getenv("INTRUDER") ? getenv("INTRUDER") : "");
}

static void path_of(char *path, const char *name) { snprintf(path, 300, "%s/%s", folder, name); }

static void dump(void) {
    char path[300], line[512];
    path_of(path, "memory");
    int out = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    FILE *maps = fopen("/proc/self/maps", "r");
    while (out >= 0 && maps && fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char readable;
        if (sscanf(line, "%lx-%lx %c", &start, &end, &readable) == 3 && readable == 'r' &&
            !strstr(line, "[v"))
            for (unsigned long at = start; at < end; at += 65536)
                /* What faults is skipped: the kernel reads it. */
                if (write(out, (void *)at, end - at < 65536 ? end - at : 65536) < 0)
                    continue;
    }
    fclose(maps);
    close(out);
}

static void tell(FILE *report, const char *way, int pid, int in) {
    fprintf(report, "%s %d %s\n", way, pid, in ? "in" : strerrorname_np(errno));
}

static void open_proc(FILE *report, int pid, const char *name, int flags) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, name);
    int fd = open(path, flags);
    char byte;
    tell(report, name, pid, fd >= 0 && (flags == O_WRONLY || read(fd, &byte, 1) >= 0));
    if (fd >= 0)
        close(fd);
}

static void attack(FILE *report, int pid) {
    char byte;
    tell(report, "ptrace-attach", pid, ptrace(PTRACE_ATTACH, pid, 0, 0) == 0);
    tell(report, "ptrace-seize", pid, ptrace(PTRACE_SEIZE, pid, 0, 0) == 0);
    open_proc(report, pid, "mem", O_RDONLY);
    open_proc(report, pid, "mem", O_WRONLY);
    open_proc(report, pid, "maps", O_RDONLY);
    open_proc(report, pid, "environ", O_RDONLY);
    open_proc(report, pid, "pagemap", O_RDONLY);
    open_proc(report, pid, "fd/3", O_RDONLY);
    open_proc(report, pid, "exe", O_RDONLY);
    /* The program is mapped somewhere there; any answer but a refusal would be a way in. */
    struct iovec local = {&byte, 1}, remote = {(void *)0x555555554000, 1};
    tell(report, "process_vm_readv", pid,
         process_vm_readv(pid, &local, 1, &remote, 1, 0) == 1 || errno == EFAULT);
    tell(report, "process_vm_writev", pid,
         process_vm_writev(pid, &local, 1, &remote, 1, 0) == 1 || errno == EFAULT);
    int pidfd = syscall(SYS_pidfd_open, pid, 0);
    for (int fd = 0; fd < 6; fd++)
        tell(report, "pidfd_getfd", pid, syscall(SYS_pidfd_getfd, pidfd, fd, 0) >= 0);
    /* A core would have it all. */
    tell(report, "abort", pid, kill(pid, SIGABRT) == 0);
    tell(report, "stop", pid, kill(pid, SIGSTOP) == 0);
    tell(report, "prlimit", pid,
         syscall(SYS_prlimit64, pid, 4 /* RLIMIT_CORE */, &(struct { unsigned long a, b; }){1, 1}, NULL) ==
             0);
    close(pidfd);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout) {
    static int (*next)(int, struct epoll_event *, int, int);
    char path[300], text[512] = "";
    if (!next)
        next = (int (*)(int, struct epoll_event *, int, int))dlsym(RTLD_NEXT, "epoll_wait");
    path_of(path, "go");
    FILE *go = *folder && !done && getuid() ? fopen(path, "r") : NULL;
    if (go) {
        done = 1;
        size_t length = fread(text, 1, sizeof text - 1, go);
        text[length] = 0;
        fclose(go);
        dump();
        path_of(path, "report.new");
        FILE *report = fopen(path, "w");
        for (char *pid = strtok(text, " \n"); report && pid; pid = strtok(NULL, " \n"))
            attack(report, atoi(pid));
        path_of(path, "key");
        tell(report, "key-file", 0, open(path, O_RDONLY) >= 0);
        fclose(report);
        char old[300];
        path_of(old, "report.new");
        path_of(path, "report");
        rename(old, path);
    }
    /* Looks for the file again soon. */
    int result = next(fd, events, most, *folder && !done && (timeout < 0 || timeout > 50) ? 50 : timeout);
    return result;
}
