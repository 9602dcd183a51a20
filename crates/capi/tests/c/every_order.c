/* Several snapshots with different states each, resumed in every order, come back as their expected copies
 * say. */
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "check.h"

enum { STATES = 4, ROUNDS = 6 * STATES * STATES, HEAP = 3 * 4096 + 123 };

/* What survives: expected states, and the way so far. */
struct kept {
    orrery_rollback_snapshot_t ids[STATES];
    int seen[STATES][STATES];
    int taken, at, steps;
    unsigned random;
    char heap[STATES][HEAP];
    off_t offset[STATES];
    dev_t file_device[STATES];
    ino_t file_inode[STATES], directory[STATES];
};

static struct kept *kept;
static char *heap;
static int file, extra[STATES];
static void *mapping[STATES];
static char folder[64];

static void handler0(int signal) { (void)signal; }
static void handler1(int signal) { (void)signal; }
static void handler2(int signal) { (void)signal; }
static void handler3(int signal) { (void)signal; }
static void (*const handlers[STATES])(int) = {handler0, handler1, handler2, handler3};

/* Changes everything for state n. */
static void enter(int n) {
    char path[80];
    for (int i = 0; i < HEAP; i++)
        heap[i] = (char)(i * (n + 3) + n);
    memcpy(kept->heap[n], heap, HEAP);
    snprintf(path, sizeof path, "%s/%d", folder, n);
    CHECK(mkdir(path, 0700) == 0 && chdir(path) == 0);
    /* A different file at the same number each time. */
    if (file >= 0)
        close(file);
    file = open("file", O_RDWR | O_CREAT, 0600);
    CHECK(file >= 0 && write(file, "0123456789", 10) == 10 && lseek(file, n + 2, SEEK_SET) == n + 2);
    kept->offset[n] = n + 2;
    extra[n] = open("/dev/null", O_RDONLY);
    umask((mode_t)(022 + n));
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, SIGRTMIN + n);
    CHECK(sigprocmask(SIG_SETMASK, &mask, NULL) == 0);
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handlers[n];
    CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
    mapping[n] =
        mmap(NULL, 4096 * (size_t)(n + 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping[n] != MAP_FAILED);
    memset(mapping[n], 'a' + n, 4096 * (size_t)(n + 1));
    if (n > 0 && n % 2 == 0)
        CHECK(munmap(mapping[n - 1], 4096) == 0);
    struct stat status;
    CHECK(fstat(file, &status) == 0);
    kept->file_device[n] = status.st_dev;
    kept->file_inode[n] = status.st_ino;
    CHECK(stat(".", &status) == 0);
    kept->directory[n] = status.st_ino;
}

static int is_mapped(const void *address) {
    unsigned char in_core;
    return mincore((void *)(uintptr_t)address, 4096, &in_core) == 0;
}

static void check_state(int n) {
    struct stat status;
    CHECK(memcmp(heap, kept->heap[n], HEAP) == 0);
    CHECK(fstat(file, &status) == 0);
    CHECK(status.st_dev == kept->file_device[n] && status.st_ino == kept->file_inode[n]);
    CHECK(lseek(file, 0, SEEK_CUR) == kept->offset[n]);
    CHECK(stat(".", &status) == 0 && status.st_ino == kept->directory[n]);
    mode_t mask = umask(0);
    CHECK(mask == (mode_t)(022 + n));
    umask(mask);
    sigset_t signals;
    CHECK(sigprocmask(SIG_SETMASK, NULL, &signals) == 0);
    struct sigaction action;
    CHECK(sigaction(SIGUSR1, NULL, &action) == 0 && action.sa_handler == handlers[n]);
    for (int i = 0; i < STATES; i++) {
        CHECK(sigismember(&signals, SIGRTMIN + i) == (i == n));
        CHECK((extra[i] > 0) == (i <= n));
        CHECK(i > n || fcntl(extra[i], F_GETFD) == 0);
        CHECK((mapping[i] != NULL) == (i <= n));
        if (i <= n) {
            /* Odd ones lose their first page in the next state. */
            const char *last = (const char *)mapping[i] + 4096 * (size_t)i;
            CHECK(is_mapped(mapping[i]) == !(i % 2 == 1 && i < n));
            CHECK(last[0] == 'a' + i && last[4095] == 'a' + i);
        }
    }
}

/* Leaves nothing as it was. */
static void wreck(void) {
    memset(heap, 0x55, HEAP);
    lseek(file, 0, SEEK_END);
    close(file);
    CHECK(open("/dev/zero", O_RDONLY) >= 0);
    CHECK(chdir("/") == 0);
    umask(077);
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    signal(SIGUSR1, SIG_IGN);
    for (int i = 0; i < STATES; i++)
        if (mapping[i])
            munmap(mapping[i], 4096 * (size_t)(i + 1));
}

int main(void) {
    size_t size = (sizeof *kept + 4095) & ~(size_t)4095;
    kept = (struct kept *)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(kept != MAP_FAILED && orrery_rollback_exclude(kept, size) == 0);
    heap = (char *)malloc(HEAP);
    file = -1;
    strcpy(folder, "/tmp/orrery-c-XXXXXX");
    CHECK(mkdtemp(folder));
    for (int n = 0; n < STATES; n++) {
        enter(n);
        int got = orrery_rollback_snapshot(&kept->ids[n]);
        CHECK(got >= 0);
        CHECK(!orrery_last_error());
        if (got == 0) {
            kept->taken = n + 1;
            kept->at = n;
            if (n + 1 < STATES)
                continue;
        } else {
            CHECK(got == n + 1);
            check_state(n);
            kept->seen[kept->at][n] = 1;
            kept->at = n;
        }
        if (kept->steps++ < ROUNDS) {
            /* Every pair of neighbours, in a walk that is not the same as the loop's. */
            int next = (n + kept->steps / STATES + kept->steps % 3) % STATES;
            if (kept->steps % 5)
                wreck();
            orrery_rollback_resume(kept->ids[next], next + 1);
            CHECK(0);
        }
        for (int a = 0; a < STATES; a++)
            for (int b = 0; b < STATES; b++)
                CHECK(kept->seen[a][b]);
        break;
    }
    char command[100];
    snprintf(command, sizeof command, "rm -r %s", folder);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    CHECK(chdir("/") == 0 && system(command) == 0);
    return 0;
}
