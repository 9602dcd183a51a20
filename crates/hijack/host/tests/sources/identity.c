/* Who a process is, asked often, while everything changes that the answers depend on. Each answer is compared with what
 * the kernel says by other calls, which are never remembered. Prints nothing but what is wrong. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;

static long number_in(const char *link) {
    char text[64] = "";
    if (readlink(link, text, sizeof text - 1) < 0)
        return -1;
    char *slash = strrchr(text, '/');
    return atol(slash ? slash + 1 : text);
}

/* Often enough for each site to be rewritten. */
static void check(const char *when) {
    for (int round = 0; round < 40; round++) {
        uid_t real, effective, saved;
        gid_t real_group, effective_group, saved_group;
        getresuid(&real, &effective, &saved);
        getresgid(&real_group, &effective_group, &saved_group);
        long told[] = {getpid(), syscall(SYS_gettid), getuid(), geteuid(), getgid(), getegid(), gettid()};
        long thread = number_in("/proc/thread-self");
        long truth[] = {number_in("/proc/self"), thread, real, effective, real_group,
                        effective_group,         thread};
        for (int which = 0; which < 7; which++)
            if (told[which] != truth[which]) {
                printf("%s: answer %d is %ld rather than %ld\n", when, which, told[which], truth[which]);
                failures++;
            }
    }
}

static int wait_for(pid_t child) {
    int status;
    while (waitpid(child, &status, __WALL) < 0 && errno == EINTR)
        ;
    return status;
}

static void expect_zero(const char *when, pid_t child) {
    int status = child < 0 ? -1 : wait_for(child);
    if (status != 0) {
        printf("%s: status %x\n", when, status);
        failures++;
    }
}

static void forks(void) {
    pid_t child = fork();
    if (child == 0) {
        check("child");
        pid_t grandchild = fork();
        if (grandchild == 0) {
            check("grandchild");
            _exit(failures != 0);
        }
        expect_zero("grandchild", grandchild);
        _exit(failures != 0);
    }
    check("parent");
    expect_zero("child", child);
    /* The raw call, with a parent that waits or does not. */
    child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        check("cloned child");
        _exit(failures != 0);
    }
    expect_zero("cloned child", child);
}

static volatile pid_t asked_in_child;

__attribute__((noinline)) static void vforks(void) {
    static pid_t parent, child;
    static int round;
    parent = getpid();
    for (round = 0; round < 30; round++) {
        child = vfork();
        if (child == 0) {
            asked_in_child = getpid();
            _exit(0);
        }
        if (asked_in_child != child || getpid() != parent) {
            printf("vfork: %d rather than %d, then %d rather than %d\n", asked_in_child, child, getpid(),
                   parent);
            failures++;
        }
        expect_zero("vfork", child);
    }
    check("after vfork");
}

static int shares(void *unused) {
    (void)unused;
    check("process with the same memory");
    return failures != 0;
}

static void shared_memory(void) {
    char *stack = malloc(1 << 18);
    pid_t child = clone(shares, stack + (1 << 18), CLONE_VM | SIGCHLD, NULL);
    check("beside a process with the same memory");
    expect_zero("process with the same memory", child);
    check("after a process with the same memory");
    free(stack);
}

static void *changes(void *unused) {
    check("thread");
    /* For this thread alone. */
    if (syscall(SYS_setresuid, -1, 4242, -1) != 0)
        printf("setresuid: %s\n", strerror(errno));
    check("thread as another user");
    return unused;
}

static void threads(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, changes, NULL);
    check("beside a thread");
    pthread_join(thread, NULL);
    check("after a thread");
}

static void in_child(const char *when, void (*act)(void)) {
    pid_t child = fork();
    if (child == 0) {
        check(when);
        act();
        check(when);
        exit(failures != 0);
    }
    expect_zero(when, child);
}

static void other_user(void) {
    if (setegid(5) != 0 || seteuid(6) != 0)
        printf("seteuid: %s\n", strerror(errno));
    check("seteuid");
    if (seteuid(0) != 0 || setgid(7) != 0 || setuid(8) != 0)
        printf("setuid: %s\n", strerror(errno));
}

static void in_handler(int signal) {
    (void)signal;
    static int round;
    if (setresuid(-1, ++round % 2 ? 9 : 0, -1) != 0)
        printf("setresuid: %s\n", strerror(errno));
}

static void changed_by_handlers(void) {
    signal(SIGUSR1, in_handler);
    for (int round = 0; round < 20; round++) {
        raise(SIGUSR1);
        check("changed by a handler");
    }
}

static void write_to(const char *path, const char *text) {
    int file = open(path, O_WRONLY);
    if (file < 0 || write(file, text, strlen(text)) < 0)
        printf("%s: %s\n", path, strerror(errno));
    close(file);
}

static void namespace(void) {
    int ready[2], done[2];
    char byte;
    if (pipe(ready) != 0 || pipe(done) != 0)
        return;
    pid_t owner = getpid(), writer = fork();
    if (writer == 0) {
        char path[64];
        if (read(ready[0], &byte, 1) != 1)
            _exit(1);
        snprintf(path, sizeof path, "/proc/%d/uid_map", owner);
        write_to(path, "77 0 1\n");
        _exit(write(done[1], "", 1) != 1);
    }
    if (unshare(CLONE_NEWUSER) != 0) {
        /* Forbidden here: then there is nothing to see. */
        kill(writer, SIGKILL);
        wait_for(writer);
        return;
    }
    check("without map");
    if (write(ready[1], "", 1) != 1 || read(done[0], &byte, 1) != 1)
        printf("the writer is gone\n");
    /* Somebody else has said who we are. */
    check("with a map");
    if (getuid() != 77) {
        printf("map: user %d\n", getuid());
        failures++;
    }
    expect_zero("writer", writer);
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    check("at first");
    forks();
    vforks();
    if (geteuid() == 0) {
        in_child("users", other_user);
        in_child("handlers", changed_by_handlers);
        in_child("threads", threads);
    }
    in_child("namespace", namespace);
    in_child("vfork in a child", vforks);
    in_child("shared memory", shared_memory);
    check("in the end");
    return failures != 0;
}
