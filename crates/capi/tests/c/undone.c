/* Descriptors, directory, umask, mappings, break, limits, timers, children and threads are undone at a
 * resume. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>

#include "check.h"

static void *forever(void *unused) {
    for (;;)
        pause();
    return unused;
}

int main(void) {
    char path[] = "/tmp/orrery-c-XXXXXX";
    char here[1000], there[1000], byte;
    int ends[2], pair[2];
    struct rlimit limit, limit_now;
    int file = mkstemp(path);
    CHECK(file >= 0 && unlink(path) == 0);
    CHECK(write(file, "abcdefgh", 8) == 8 && lseek(file, 3, SEEK_SET) == 3);
    CHECK(pipe(ends) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
    CHECK(getcwd(here, sizeof here));
    umask(027);
    CHECK(getrlimit(RLIMIT_CORE, &limit) == 0);
    char *stays = (char *)mmap(NULL, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    volatile int *shared =
        (volatile int *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(stays != MAP_FAILED && shared != MAP_FAILED);
    memset(stays, 's', 4 * 4096);
    /* The first call allocates a little, which may be what makes the heap. */
    char *volatile prime = (char *)malloc(1);
    free(prime);
    void *program_break = sbrk(0);
    int lowest = dup(0);
    CHECK(lowest >= 0 && close(lowest) == 0);
    orrery_rollback_snapshot_t start;
    int got = orrery_rollback_snapshot(&start);
    CHECK(got >= 0);
    CHECK(!orrery_last_error());

    CHECK(lseek(file, 0, SEEK_CUR) == 3);
    CHECK(fcntl(file, F_GETFD) == 0 && !(fcntl(ends[0], F_GETFL) & O_NONBLOCK));
    /* The library keeps out of the way of the next open(2). */
    CHECK(dup(0) == lowest && close(lowest) == 0);
    CHECK(write(ends[1], "x", 1) == 1 && read(ends[0], &byte, 1) == 1 && byte == 'x');
    CHECK(write(pair[0], "y", 1) == 1 && read(pair[1], &byte, 1) == 1 && byte == 'y');
    CHECK(getcwd(there, sizeof there) && strcmp(here, there) == 0);
    mode_t mask = umask(027);
    CHECK(mask == 027);
    CHECK(getrlimit(RLIMIT_CORE, &limit_now) == 0 && memcmp(&limit, &limit_now, sizeof limit) == 0);
    CHECK(sbrk(0) == program_break);
    for (int at = 0; at < 4 * 4096; at += 4096) {
        CHECK(stays[at] == 's');
        stays[at] = 's';
    }
    struct itimerval timer;
    CHECK(getitimer(ITIMER_VIRTUAL, &timer) == 0 && timer.it_value.tv_sec == 0 &&
          timer.it_value.tv_usec == 0);
    CHECK(waitpid(-1, NULL, WNOHANG) == -1 && errno == ECHILD);
    CHECK(*shared == got);
    if (*shared == 8)
        return 0;
    ++*shared;

    CHECK(lseek(file, 0, SEEK_END) == 8);
    switch (got % 4) {
    case 0:
        CHECK(fcntl(file, F_SETFD, FD_CLOEXEC) == 0 && fcntl(ends[0], F_SETFL, O_NONBLOCK) == 0);
        CHECK(dup2(pair[0], ends[1]) == ends[1] && dup(0) >= 0 && dup(0) >= 0);
        break;
    case 1:
        close(file);
        close(ends[0]);
        close(pair[1]);
        CHECK(open("/dev/null", O_RDONLY) == file);
        break;
    case 2:
        /* Everything, the library's own included; standard error stays for what may go wrong. */
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
        break;
    default:
        CHECK(dup2(file, 900) == 900);
        break;
    }
    CHECK(chdir("/proc") == 0);
    umask(got % 8);
    limit_now.rlim_cur = 0;
    CHECK(setrlimit(RLIMIT_CORE, &limit_now) == 0);
    CHECK(sbrk(70000) != (void *)-1);
    CHECK(munmap(stays + 4096, 4096) == 0 && mprotect(stays + 8192, 4096, PROT_NONE) == 0);
    if (got % 2)
        CHECK(mmap(stays, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == stays);
    timer.it_value.tv_sec = 1000;
    CHECK(setitimer(ITIMER_VIRTUAL, &timer, NULL) == 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        /* Should this test fail. */
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        forever(NULL);
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, forever, NULL) == 0);
    orrery_rollback_resume(start, got + 1);
    CHECK(0);
}
