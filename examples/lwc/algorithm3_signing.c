/*
 * A key that only its own context can read: Algorithm 3 of "Light-Weight Contexts" (OSDI 2016).
 *
 *     cc -Iinclude examples/lwc/algorithm3_signing.c -Ltarget/release -lorrery -o algorithm3
 *     printf 'first\nsecond\n' | LD_LIBRARY_PATH=target/release ./algorithm3
 *
 * The "signature" is a keyed checksum of no cryptographic worth. In a program that runs as the superuser,
 * drop privileges before meeting an attacker: the superuser may look into every context.
 */
#include <err.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <orrery/context.h>
#include <orrery/rollback.h>

#define PAGE 4096

/* The key has pages of its own, so that an attempt to overlay them is about nothing else. */
static char privkey[PAGE] __attribute__((aligned(PAGE)));

/* What is passed to the signer: whole pages, for that is what can be overlaid. */
struct arg {
    char in[PAGE - sizeof(unsigned)];
    unsigned out;
};

static unsigned sign(const char *key, const char *data) {
    unsigned sum = 2166136261u;
    for (; *key; key++)
        sum = (sum ^ (unsigned char)*key) * 16777619u;
    for (; *data; data++)
        sum = (sum ^ (unsigned char)*data) * 16777619u;
    return sum;
}

/* In the signer's context: signs whatever its caller passes. */
static void sign_sstub(int caller, uint64_t arg) {
    for (;;) {
        struct arg *shared = (struct arg *)(uintptr_t)arg;
        struct orrery_context_spec map = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_SHARE, (uintptr_t)arg,
                                          sizeof *shared};
        struct orrery_context_spec unmap = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_UNMAP, (uintptr_t)arg,
                                            sizeof *shared};
        if (orrery_context_overlay(caller, &map, 1) < 0)
            errx(1, "orrery_context_overlay: %s", orrery_last_error());
        shared->in[sizeof shared->in - 1] = 0;
        shared->out = sign(privkey, shared->in);
        if (orrery_context_overlay(caller, &unmap, 1) < 0)
            errx(1, "orrery_context_overlay: %s", orrery_last_error());
        caller = orrery_context_switch(caller, 0, &arg);
        if (caller < 0)
            errx(1, "orrery_context_switch: %s", orrery_last_error());
    }
}

static void sign_cstub(int child, struct arg *buf) {
    if (orrery_context_switch(child, (uintptr_t)buf, NULL) < 0)
        errx(1, "orrery_context_switch: %s", orrery_last_error());
}

int main(void) {
    strcpy(privkey, "the private key");
    struct arg *buf = mmap(NULL, sizeof *buf, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buf == MAP_FAILED)
        err(1, "mmap");

    struct orrery_context_spec all = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_MAY_ACCESS, 0, ORRERY_CONTEXT_ALL};
    int caller;
    uint64_t arg;
    int child = orrery_context_create(&all, 1, 0, &caller, &arg);
    if (child < 0)
        errx(1, "orrery_context_create: %s", orrery_last_error());
    if (caller != -1)
        sign_sstub(caller, arg);
    explicit_bzero(privkey, sizeof privkey);
    if (orrery_context_restrict(child, NULL, 0) < 0)
        errx(1, "orrery_context_restrict: %s", orrery_last_error());

    while (fgets(buf->in, sizeof buf->in, stdin)) {
        buf->in[strcspn(buf->in, "\n")] = 0;
        sign_cstub(child, buf);
        printf("%s: %08x\n", buf->in, buf->out);
    }
    struct orrery_context_spec key = {ORRERY_CONTEXT_VM, ORRERY_CONTEXT_COW, (uintptr_t)privkey,
                                      sizeof privkey};
    if (orrery_context_overlay(child, &key, 1) == -1 && errno == EACCES && !privkey[0])
        puts("the key is out of reach");
    return 0;
}
