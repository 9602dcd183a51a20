/* Thousands of resumes, and of snapshots taken and discarded, leave descriptors, mappings, children and
 * memory alone. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>

#include "check.h"

enum { WARM = 200, ROUNDS = 3000 };

struct counts {
    int descriptors, mappings, children;
    long resident;
};

/* What survives. */
static struct kept {
    struct counts before;
    int rounds;
} * kept;

static struct counts count(void) {
    static char text[1 << 16];
    struct counts found = {0, 0, 0, 0};
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder);
    while (readdir(folder))
        found.descriptors++;
    closedir(folder);
    int maps = open("/proc/self/maps", O_RDONLY);
    ssize_t length;
    while ((length = read(maps, text, sizeof text)) > 0)
        for (ssize_t at = 0; at < length; at++)
            found.mappings += text[at] == '\n';
    close(maps);
    snprintf(text, sizeof text, "/proc/self/task/%d/children", (int)getpid());
    int children = open(text, O_RDONLY);
    while ((length = read(children, text, sizeof text)) > 0)
        for (ssize_t at = 0; at < length; at++)
            found.children += text[at] == ' ';
    close(children);
    int statm = open("/proc/self/statm", O_RDONLY);
    CHECK(read(statm, text, sizeof text - 1) > 0);
    CHECK(sscanf(text, "%*d %ld", &found.resident) == 1);
    close(statm);
    return found;
}

static void check_counts(void) {
    struct counts now = count(), before = kept->before;
    CHECK(now.descriptors == before.descriptors);
    CHECK(now.children == before.children);
    CHECK(now.mappings <= before.mappings + 2);
    /* 2 MiB for what the kernel is late to count. */
    CHECK(now.resident < before.resident + 512);
}

static void misbehave(int round) {
    char *leak = (char *)malloc(50000);
    memset(leak, round, 50000);
    char *mapping = (char *)mmap(NULL, 8 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(mapping != MAP_FAILED);
    memset(mapping, round, 8 * 4096);
    mprotect(mapping + 4096, 4096, PROT_READ);
    CHECK(open("/dev/null", O_RDONLY) >= 0);
    CHECK(sbrk(4096 * (1 + round % 3)) != (void *)-1);
}

int main(void) {
    kept = (struct kept *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(kept != MAP_FAILED);
    (void)count();
    /* Two states, so that there is one to go to and fro. */
    orrery_rollback_snapshot_t first, second;
    int got = orrery_rollback_snapshot(&first);
    CHECK(got >= 0 && !orrery_last_error());
    int rounds = kept->rounds;
    if (rounds > 0 && rounds < ROUNDS) {
        kept->rounds++;
        misbehave(rounds);
        if (rounds == WARM)
            kept->before = count();
        orrery_rollback_resume(first, 1);
        CHECK(0);
    }
    if (rounds == 0) {
        kept->rounds = 1;
        orrery_rollback_resume(first, 1);
        CHECK(0);
    }
    /* The count above was made with a descriptor and two mappings more. */
    kept->before.descriptors--;
    check_counts();

    kept->before = count();
    for (kept->rounds = 0; kept->rounds < ROUNDS / 10; kept->rounds++) {
        got = orrery_rollback_snapshot(&second);
        CHECK(got >= 0);
        if (got == 0) {
            misbehave(kept->rounds);
            orrery_rollback_resume(second, 1);
            CHECK(0);
        }
        CHECK(orrery_rollback_discard(second) == 0);
        if (kept->rounds == WARM)
            kept->before = count();
    }
    check_counts();
    return 0;
}
