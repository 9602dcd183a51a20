/*
 * Transcodes films in instances of a library, by several threads, which take the instances' frames in turn, and compares each with what
 * the plain library returns: transcode LIBRARY PLAIN COUNT FRAMES.
 */

#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <orrery/instance.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { THREADS = 4, AV_LOG_QUIET = -8 };

struct functions {
    void *(*open)(unsigned seed, int frames);
    int (*step)(void *film);
    uint64_t (*close)(void *film);
    void (*settings)(int level, int cpu_flags);
    int (*level)(void);
    int (*cpu_flags)(void);
};

struct job {
    struct orrery_instance *instance;
    void *film;
    struct job *next;
    uint64_t expected, hash;
    unsigned seed;
    int level, flags;
    int turns;
    unsigned threads; /* a bit for each thread that has worked for it */
};

static struct functions ours;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct job *first, **last = &first;
static size_t changes; /* how often another thread than before took an instance */

static void die(const char *operation, unsigned seed) {
    fprintf(stderr, "cannot %s, film %u: %s\n", operation, seed, strerror(errno));
    exit(1);
}

static struct functions find(void *(*symbol)(void *of, const char *name), void *of) {
    struct functions found = {
        .open = (void *(*)(unsigned, int))symbol(of, "film_open"),
        .step = (int (*)(void *))symbol(of, "film_step"),
        .close = (uint64_t(*)(void *))symbol(of, "film_close"),
        .settings = (void (*)(int, int))symbol(of, "film_settings"),
        .level = (int (*)(void))symbol(of, "film_level"),
        .cpu_flags = (int (*)(void))symbol(of, "film_cpu_flags"),
    };
    if (!found.open || !found.step || !found.close || !found.settings || !found.level || !found.cpu_flags)
        die("find the functions", 0);
    return found;
}

static void *of_instances(void *library, const char *name) { return orrery_instance_symbol(library, name); }

static void append(struct job *job) {
    job->next = NULL;
    *last = job;
    last = &job->next;
}

static struct job *take(void) {
    pthread_mutex_lock(&lock);
    struct job *job = first;
    if (job && !(first = job->next))
        last = &first;
    pthread_mutex_unlock(&lock);
    return job;
}

/* Takes an instance, has it transcode a frame, and appends it to the list again, until all films are done. */
static void *work(void *number) {
    const unsigned own = 1U << (uintptr_t)number;
    struct job *job;
    while ((job = take())) {
        if (orrery_instance_enter(job->instance) != 0)
            die("enter", job->seed);
        const int more = ours.step(job->film);
        if (more < 0)
            die("transcode", job->seed);
        if (!more)
            job->hash = ours.close(job->film);
        if (ours.level() != job->level || ours.cpu_flags() != job->flags)
            die("find the settings again", job->seed);
        if (orrery_instance_leave(job->instance) != 0)
            die("leave", job->seed);
        pthread_mutex_lock(&lock);
        changes += !(job->threads & own);
        job->threads |= own;
        job->turns++;
        if (more)
            append(job);
        pthread_mutex_unlock(&lock);
    }
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: transcode LIBRARY PLAIN COUNT FRAMES\n");
        return 2;
    }
    const size_t count = strtoul(argv[3], NULL, 10);
    const int frames = atoi(argv[4]);
    struct orrery_instance_library *library = orrery_instance_load(argv[1], NULL);
    void *handle = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
    struct job *jobs = calloc(count, sizeof *jobs);
    if (!library || !handle || !jobs)
        die("load the libraries", 0);
    ours = find(of_instances, library);
    const struct functions plain = find(dlsym, handle);
    const int all_flags = plain.cpu_flags();
    for (size_t at = 0; at < count; at++) {
        struct job *job = &jobs[at];
        job->seed = (unsigned)at;
        /* Every third film goes without the processor's vector instructions. */
        job->flags = at % 3 == 2 ? 0 : all_flags;
        /* Levels at which nothing is printed. */
        job->level = AV_LOG_QUIET - (int)at;
        plain.settings(job->level, job->flags);
        void *film = plain.open(job->seed, frames);
        int more = film ? 1 : -1;
        while (more > 0)
            more = plain.step(film);
        if (more < 0)
            die("transcode plainly", job->seed);
        job->expected = plain.close(film);
        job->instance = orrery_instance_create(library);
        if (!job->instance || orrery_instance_enter(job->instance) != 0)
            die("make an instance", job->seed);
        ours.settings(job->level, job->flags);
        job->film = ours.open(job->seed, frames);
        if (!job->film)
            die("open a film", job->seed);
        if (orrery_instance_leave(job->instance) != 0)
            die("leave", job->seed);
        append(job);
    }
    pthread_t threads[THREADS];
    for (uintptr_t at = 0; at < THREADS; at++)
        if (pthread_create(&threads[at], NULL, work, (void *)at) != 0)
            die("start a thread", 0);
    for (size_t at = 0; at < THREADS; at++)
        pthread_join(threads[at], NULL);
    size_t different = 0, failed = 0;
    for (size_t at = 0; at < count; at++) {
        struct job *job = &jobs[at];
        if (job->hash != job->expected || job->turns != frames + 1) {
            fprintf(stderr, "film %zu: %016" PRIx64 ", plainly %016" PRIx64 ", %d turns\n", at, job->hash,
                    job->expected, job->turns);
            failed++;
        }
        /* Films differ, so that results of another instance would be noticed. */
        different += at == 0 || job->hash != jobs[at - 1].hash;
        if (orrery_instance_destroy(job->instance) != 0)
            die("destroy", job->seed);
    }
    if (different != count) {
        fprintf(stderr, "only %zu films of %zu differ\n", different, count);
        failed++;
    }
    printf("%zu instances, %zu frames of each, %zu changes of the thread, %zu failed\n", count,
           (size_t)frames, changes, failed);
    return failed != 0;
}
