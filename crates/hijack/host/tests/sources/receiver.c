// Receives datagrams. `promises` prints what each kind of receive call returns, which is the same whether calls look for a datagram
// before they block or not; `blocked` prints how often a thread of real-time priority was blocked while it received 1,000; `fifo` and
// `rr` print in which order two threads of that policy received on one CPU.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int receiving, sending;
static sigjmp_buf back;
static volatile int handled;

static double now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static void say(const char *what, long result, int error) {
    printf("%s: %ld %s\n", what, result, result < 0 ? strerrorname_np(error) : "");
}

#define SAY(what, call)                                                                                      \
    do {                                                                                                     \
        errno = 0;                                                                                           \
        long result = (call);                                                                                \
        say(what, result, errno);                                                                            \
    } while (0)

static int udp(struct sockaddr_in *address) {
    int socket_ = socket(AF_INET, SOCK_DGRAM, 0);
    socklen_t length = sizeof *address;
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(socket_, (struct sockaddr *)address, sizeof *address) ||
        getsockname(socket_, (struct sockaddr *)address, &length))
        abort();
    return socket_;
}

static int take_priority(void) {
    struct sched_param parameters = {.sched_priority = 1};
    return sched_setscheduler(0, SCHED_FIFO, &parameters);
}

static void count(int signal) {
    (void)signal;
    handled++;
}

static void leave(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static void handle(int flags, void (*function)(int)) {
    struct sigaction action = {.sa_handler = function, .sa_flags = flags};
    sigaction(SIGALRM, &action, NULL);
}

// Signals come each 2 ms from then on, until `quiet`.
static void alarms(void) {
    handled = 0;
    struct itimerval each = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &each, NULL);
}

static void quiet(void) {
    struct itimerval never = {{0, 0}, {0, 0}};
    setitimer(ITIMER_REAL, &never, NULL);
}

// Another process sends a datagram after some milliseconds.
static void send_later(int milliseconds) {
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        quiet();
        usleep(1000 * milliseconds);
        if (send(sending, "later", 5, 0) != 5)
            abort();
        _exit(0);
    }
}

static void *receive_for_ever(void *nothing) {
    char bytes[8];
    for (;;)
        recv(receiving, bytes, sizeof bytes, 0);
    return nothing;
}

static void promises(void) {
    char bytes[64] = {0};
    // Without waiting.
    SAY("do not wait", recv(receiving, bytes, sizeof bytes, MSG_DONTWAIT));
    SAY("error queue", recv(receiving, bytes, sizeof bytes, MSG_ERRQUEUE));
    fcntl(receiving, F_SETFL, O_NONBLOCK);
    double start = now(CLOCK_THREAD_CPUTIME_ID);
    SAY("does not block", recv(receiving, bytes, sizeof bytes, 0));
    printf("at once: %d\n", now(CLOCK_THREAD_CPUTIME_ID) - start < 5e-3);
    struct iovec part = {bytes, sizeof bytes};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    SAY("message does not block", recvmsg(receiving, &message, 0));
    fcntl(receiving, F_SETFL, 0);
    // One that waits, of which something is left.
    send(sending, "datagram", 8, 0);
    struct sockaddr_in from;
    socklen_t length = sizeof from;
    SAY("peek", recvfrom(receiving, bytes, 3, MSG_PEEK | MSG_TRUNC, (struct sockaddr *)&from, &length));
    printf("from %d of %u, %.3s\n", from.sin_family == AF_INET, length, bytes);
    message.msg_name = &from;
    message.msg_namelen = sizeof from;
    part.iov_len = 4;
    SAY("message", recvmsg(receiving, &message, 0));
    printf("%.4s, flags %#x, name %u\n", bytes, message.msg_flags, message.msg_namelen);
    part.iov_len = sizeof bytes;
    // One that comes later.
    for (int milliseconds = 0; milliseconds < 30; milliseconds += 3) {
        send_later(milliseconds);
        SAY("later",
            milliseconds % 2 ? recvmsg(receiving, &message, 0) : recv(receiving, bytes, sizeof bytes, 0));
        wait(NULL);
    }
    // Time limits.
    struct timeval limit = {0, 30000};
    setsockopt(receiving, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    start = now(CLOCK_MONOTONIC);
    SAY("time limit", recv(receiving, bytes, sizeof bytes, 0));
    printf("in time: %d\n", now(CLOCK_MONOTONIC) - start >= 0.03);
    // With a time limit, every handler ends the call.
    limit.tv_sec = 100;
    setsockopt(receiving, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    handle(SA_RESTART, count);
    alarms();
    SAY("restarted with a time limit", recv(receiving, bytes, sizeof bytes, 0));
    quiet();
    limit = (struct timeval){0, 0};
    setsockopt(receiving, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    // Without one, by what the program asked for: the first handler ends the call, unless this thread was kept from making it for so long.
    handle(0, count);
    int by_first = 0;
    for (int round = 0; round < 20; round++) {
        handled = 0;
        struct itimerval seldom = {{0, 200000}, {0, 2000}};
        setitimer(ITIMER_REAL, &seldom, NULL);
        SAY("ended by a handler",
            round % 2 ? recvmsg(receiving, &message, 0) : recv(receiving, bytes, sizeof bytes, 0));
        quiet();
        by_first += handled == 1;
    }
    printf("by the first: %d\n", by_first > 10);
    handle(SA_RESTART, count);
    send_later(30);
    alarms();
    SAY("restarted", recv(receiving, bytes, sizeof bytes, 0));
    quiet();
    printf("handled: %d\n", handled > 0);
    wait(NULL);
    handle(SA_RESTART, SIG_IGN);
    send_later(30);
    alarms();
    SAY("ignored", recv(receiving, bytes, sizeof bytes, 0));
    quiet();
    wait(NULL);
    handle(0, leave);
    if (!sigsetjmp(back, 1)) {
        alarms();
        recv(receiving, bytes, sizeof bytes, 0);
        puts("not left");
    }
    quiet();
    puts("left");
    // A thread that is cancelled.
    pthread_t thread;
    for (int round = 0; round < 10; round++) {
        pthread_create(&thread, NULL, receive_for_ever, NULL);
        usleep(round * 1000);
        pthread_cancel(thread);
        void *result;
        pthread_join(thread, &result);
        printf("cancelled: %d\n", result == PTHREAD_CANCELED);
    }
    // What is wrong.
    SAY("no descriptor", recv(999, bytes, sizeof bytes, 0));
    SAY("no socket", recv(open("/dev/null", O_RDONLY), bytes, sizeof bytes, 0));
    SAY("no message", recvmsg(receiving, NULL, 0));
    send(sending, "datagram", 8, 0);
    SAY("no memory", recv(receiving, (void *)16, 8, 0));
    shutdown(receiving, SHUT_RD);
    // Others: the end of a socket whose datagrams have an order, and a stream that waits for all it was asked for.
    int pair[2];
    socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair);
    close(pair[1]);
    SAY("end", recv(pair[0], bytes, sizeof bytes, 0));
    socketpair(AF_UNIX, SOCK_STREAM, 0, pair);
    sending = pair[1];
    send_later(0);
    send_later(20);
    SAY("all of a stream", recv(pair[0], bytes, 10, MSG_WAITALL));
    wait(NULL);
    wait(NULL);
    send_later(20);
    SAY("what there is of a stream", recv(pair[0], bytes, 10, 0));
    wait(NULL);
    int low = 10;
    setsockopt(pair[0], SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
    send_later(0);
    send_later(20);
    SAY("as much of a stream as it is to have", recv(pair[0], bytes, 20, 0));
    wait(NULL);
    wait(NULL);
    socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
    sending = pair[1];
    send_later(20);
    SAY("local", recv(pair[0], bytes, sizeof bytes, 0));
    wait(NULL);
    // An error that comes later: the port is closed.
    struct sockaddr_in own, other;
    int refused = udp(&own), closed = udp(&other);
    close(closed);
    connect(refused, (struct sockaddr *)&other, sizeof other);
    send(refused, "x", 1, 0);
    SAY("refused", recv(refused, bytes, sizeof bytes, 0));
}

enum { DATAGRAMS = 1000 };

// The other side of what is received: each answer is sent when the one before it has come.
static void *answer(void *to) {
    int socket_ = *(int *)to;
    char byte;
    for (int datagram = 0; datagram < DATAGRAMS; datagram++) {
        if (read(socket_, &byte, 1) != 1)
            abort();
        // Longer than it takes to be in the receive call again.
        double start = now(CLOCK_MONOTONIC);
        while (now(CLOCK_MONOTONIC) - start < 50e-6)
            ;
        if (send(socket_, "a", 1, 0) != 1)
            abort();
    }
    return NULL;
}

static void blocked(void) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_DGRAM, 0, pair) || take_priority()) {
        puts("no priority");
        return;
    }
    pthread_t thread;
    pthread_create(&thread, NULL, answer, &pair[1]);
    struct rusage before, after;
    getrusage(RUSAGE_THREAD, &before);
    for (int datagram = 0; datagram < DATAGRAMS; datagram++) {
        char byte;
        if (send(pair[0], "q", 1, 0) != 1 || recv(pair[0], &byte, 1, 0) != 1)
            abort();
    }
    getrusage(RUSAGE_THREAD, &after);
    pthread_join(thread, NULL);
    printf("%ld\n", after.ru_nvcsw - before.ru_nvcsw);
}

enum { QUEUED = 50 };

static int queues[2];
static char order[2 * QUEUED + 1];
static int received;

static void *take(void *number) {
    long which = (long)number;
    char byte;
    for (int datagram = 0; datagram < QUEUED; datagram++) {
        if (recv(queues[which], &byte, 1, 0) != 1)
            abort();
        // Threads of one CPU that are not preempted.
        order[received++] = 'a' + which;
    }
    return NULL;
}

static void *receive_many(void *nothing) {
    struct sockaddr_in address, own;
    char byte;
    int to = udp(&address), from = udp(&own);
    for (int datagram = 0; datagram < 100; datagram++)
        if (sendto(from, "x", 1, 0, (struct sockaddr *)&address, sizeof address) != 1 ||
            recv(to, &byte, 1, 0) != 1)
            abort();
    return nothing;
}

// Two threads of the same priority on one CPU, each with datagrams that wait.
static void turns(int policy) {
    cpu_set_t first;
    CPU_ZERO(&first);
    CPU_SET(0, &first);
    sched_setaffinity(0, sizeof first, &first);
    struct sched_param high = {.sched_priority = 2}, low = {.sched_priority = 1};
    if (sched_setscheduler(0, SCHED_FIFO, &high)) {
        puts("no priority");
        return;
    }
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setinheritsched(&attributes, PTHREAD_EXPLICIT_SCHED);
    pthread_attr_setschedpolicy(&attributes, policy);
    pthread_attr_setschedparam(&attributes, &low);
    pthread_t threads[2];
    struct sockaddr_in address, own;
    // A thread waits when the call becomes one that is not dispatched, after some calls: not one of the two.
    pthread_create(&threads[0], NULL, receive_many, NULL);
    pthread_join(threads[0], NULL);
    for (long which = 0; which < 2; which++) {
        queues[which] = udp(&address);
        int from = udp(&own);
        for (int datagram = 0; datagram < QUEUED; datagram++)
            if (sendto(from, "x", 1, 0, (struct sockaddr *)&address, sizeof address) != 1)
                abort();
    }
    for (long which = 0; which < 2; which++)
        if (pthread_create(&threads[which], &attributes, take, (void *)which))
            abort();
    for (int which = 0; which < 2; which++)
        pthread_join(threads[which], NULL);
    puts(order);
}

int main(int count_, char **words) {
    if (count_ == 2 && (!strcmp(words[1], "fifo") || !strcmp(words[1], "rr"))) {
        turns(words[1][0] == 'f' ? SCHED_FIFO : SCHED_RR);
        return 0;
    }
    if (count_ == 2 && !strcmp(words[1], "blocked")) {
        blocked();
        return 0;
    }
    struct sockaddr_in address, own;
    receiving = udp(&address);
    sending = udp(&own);
    if (connect(sending, (struct sockaddr *)&address, sizeof address))
        abort();
    // Where that is not permitted, calls do not look, and all is the same.
    take_priority();
    promises();
    return 0;
}
