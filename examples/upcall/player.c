/*
 * A program that works less when an extension says so.
 *
 *     clang --target=wasm32 -O2 -nostdlib -Wl,--no-entry -Wl,-z,stack-size=16384 -o quality.wasm quality.c
 *     cc -o player player.c -lorrery
 *     orrery run --extension quality.toml -- ./player
 *
 * Prints each new quality, and ends with the tenth. Without Orrery it says why there is none.
 */
#include <err.h>
#include <orrery/hijack.h>
#include <signal.h>
#include <stdio.h>
#include <time.h>

static volatile sig_atomic_t quality, changes;

static void on_upcall(int64_t number, int64_t value, void *user) {
    (void)user;
    if (number == 1) {
        quality = (sig_atomic_t)value;
        changes++;
    }
}

int main(void) {
    if (orrery_upcall_register(NULL, on_upcall, NULL) != 0)
        errx(1, "%s", orrery_last_error());
    for (int seen = 0; seen < 10;) {
        struct timespec frame = {0, 10 * 1000 * 1000};
        nanosleep(&frame, NULL);
        if (seen != changes) {
            seen = changes;
            printf("quality %d\n", (int)quality);
            fflush(stdout);
        }
    }
    return orrery_upcall_unregister();
}
