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
#include <orrery/lwc.h>

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
        struct lwc_spec map = {LWC_VM, LWC_SHARE, (uintptr_t)arg, sizeof *shared};
        struct lwc_spec unmap = {LWC_VM, LWC_UNMAP, (uintptr_t)arg, sizeof *shared};
        if (lwOverlay(caller, &map, 1) < 0)
            errx(1, "lwOverlay: %s", lw_error());
        shared->in[sizeof shared->in - 1] = 0;
        shared->out = sign(privkey, shared->in);
        if (lwOverlay(caller, &unmap, 1) < 0)
            errx(1, "lwOverlay: %s", lw_error());
        caller = lwSwitch(caller, 0, &arg);
        if (caller < 0)
            errx(1, "lwSwitch: %s", lw_error());
    }
}

static void sign_cstub(int child, struct arg *buf) {
    if (lwSwitch(child, (uintptr_t)buf, NULL) < 0)
        errx(1, "lwSwitch: %s", lw_error());
}

int main(void) {
    strcpy(privkey, "the private key");
    struct arg *buf = mmap(NULL, sizeof *buf, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buf == MAP_FAILED)
        err(1, "mmap");

    struct lwc_spec all = {LWC_VM, LWC_MAY_OVERLAY, 0, LWC_ALL};
    int caller;
    uint64_t arg;
    int child = lwCreate(&all, 1, 0, &caller, &arg);
    if (child < 0)
        errx(1, "lwCreate: %s", lw_error());
    if (caller != -1)
        sign_sstub(caller, arg);
    explicit_bzero(privkey, sizeof privkey);
    if (lwRestrict(child, NULL, 0) < 0)
        errx(1, "lwRestrict: %s", lw_error());

    while (fgets(buf->in, sizeof buf->in, stdin)) {
        buf->in[strcspn(buf->in, "\n")] = 0;
        sign_cstub(child, buf);
        printf("%s: %08x\n", buf->in, buf->out);
    }
    struct lwc_spec key = {LWC_VM, LWC_COW, (uintptr_t)privkey, sizeof privkey};
    if (lwOverlay(child, &key, 1) == -1 && errno == EACCES && !privkey[0])
        puts("the key is out of reach");
    return 0;
}
