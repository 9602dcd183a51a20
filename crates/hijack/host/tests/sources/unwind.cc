// Unwinding through calls that a signal interrupts: destructors of a thread that is cancelled, exceptions that a handler
// throws. Must be the same with an executive.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// So often is each call made before the one that blocks: from then on its place is rewritten.
constexpr int HOT = 60;

static int fds[2], listener;
static volatile int turn;
static volatile pid_t other;

struct Guard {
    const char *name;
    long number;
    ~Guard() { std::printf("destroyed %s %ld\n", name, number); }
};

static void blocks(int which) {
    char byte;
    timespec time = {0, 1}, long_time = {20, 0};
    sem_t semaphore;
    for (int i = 0; i < HOT && which == 0; i++) {
        (void)!write(fds[1], "x", 1);
        (void)!read(fds[0], &byte, 1);
    }
    for (int i = 0; i < HOT && which == 1; i++)
        nanosleep(&time, nullptr);
    for (int i = 0; i < HOT && which == 2; i++)
        accept(-1, nullptr, nullptr);
    sem_init(&semaphore, 0, 0);
    turn = 1;
    switch (which) {
    case 0:
        (void)!read(fds[0], &byte, 1);
        break;
    case 1:
        nanosleep(&long_time, nullptr);
        break;
    case 2:
        accept(listener, nullptr, nullptr);
        break;
    case 3:
        pause();
        break;
    case 4:
        sem_wait(&semaphore);
        break;
    }
    std::printf("returned\n");
}

// Variables that the compiler keeps in registers which the executive must hand back.
__attribute__((noinline)) static void deep(int which, int depth, long value) {
    Guard guard{"frame", value * 3 + depth};
    if (depth > 0)
        deep(which, depth - 1, value + depth);
    else
        blocks(which);
}

static bool sleeps(pid_t thread) {
    char path[64], text[512] = "";
    std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    int file = open(path, O_RDONLY);
    ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    char *state = length > 0 ? std::strrchr(text, ')') : nullptr;
    return state && state[2] == 'S';
}

static void await() {
    for (int calm = 0; calm < 5;) {
        usleep(2000);
        calm = turn && other && sleeps(other) ? calm + 1 : 0;
    }
}

static void *cancelled(void *argument) {
    other = static_cast<pid_t>(syscall(SYS_gettid));
    Guard guard{"thread", reinterpret_cast<long>(argument)};
    deep(static_cast<int>(reinterpret_cast<long>(argument)), 3, 5);
    return nullptr;
}

static void cancel() {
    for (long which = 0; which < 5; which++) {
        turn = other = 0;
        pthread_t thread;
        void *result;
        pthread_create(&thread, nullptr, cancelled, reinterpret_cast<void *>(which));
        await();
        pthread_cancel(thread);
        pthread_join(thread, &result);
        std::printf("cancelled %d\n", result == PTHREAD_CANCELED);
    }
}

static void throws(int number) { throw std::runtime_error(std::to_string(number)); }

static void *poke(void *argument) {
    await();
    pthread_kill(*static_cast<pthread_t *>(argument), SIGUSR1);
    return nullptr;
}

static void exceptions() {
    struct sigaction action = {};
    action.sa_handler = throws;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGUSR1, &action, nullptr);
    sigaction(SIGSEGV, &action, nullptr);
    pthread_t self = pthread_self(), thread;
    other = getpid();
    for (int which = 0; which < 5; which++) {
        turn = 0;
        pthread_create(&thread, nullptr, poke, &self);
        try {
            deep(which, 2, 7);
        } catch (const std::runtime_error &error) {
            std::printf("caught %s\n", error.what());
        }
        pthread_join(thread, nullptr);
    }
    try {
        Guard guard{"null", 0};
        static volatile int *volatile nowhere = nullptr;
        *nowhere = 1;
    } catch (const std::runtime_error &error) {
        std::printf("caught %s\n", error.what());
    }
}

int main(int, char **words) {
    std::setvbuf(stdout, nullptr, _IONBF, 0);
    alarm(100);
    (void)!pipe(fds);
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    listener = socket(AF_UNIX, SOCK_STREAM, 0);
    bind(listener, reinterpret_cast<sockaddr *>(&address), sizeof(sa_family_t));
    listen(listener, 1);
    if (words[1] == std::string("cancel"))
        cancel();
    else
        exceptions();
}
