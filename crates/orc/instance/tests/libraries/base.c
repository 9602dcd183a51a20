/* A library that shows by which ways it reaches its state: relative to GS where it was built so, and by addresses. */
#include <setjmp.h>
#include <signal.h>

int number = 1;
static int *volatile place = &number;
static int (*callback)(int);
static jmp_buf env;
static volatile sig_atomic_t signals;
__attribute__((cls_shared)) int constructed;

__attribute__((constructor)) static void construct(void) { constructed++; }

/* The address is computed, so it is that of the thread-local word. */
int *where(void) { return &number; }
/* A direct access, of one that is passed on, and of one in the state. */
int are_one(void) {
    number++;
    int one = *where() == number;
    *where() += 1;
    one &= *place == number;
    *place += 1;
    return one && *where() == number;
}
int get(void) { return number; }
void set(int to) { number = to; }
void set_callback(int (*function)(int)) { callback = function; }
int call_back(int n) {
    int before = number;
    int result = callback(n);
    return are_one() && number == before + 3 ? result : -1;
}
static void handle(int of) { signals += of == SIGUSR1 && are_one(); }
int raise_signal(void) {
    signal(SIGUSR1, handle);
    raise(SIGUSR1);
    return signals;
}
/* The callback leaves by jump(). */
int jumped(int n) { return setjmp(env) ? number : callback(n); }
void jump(void) { longjmp(env, 1); }
