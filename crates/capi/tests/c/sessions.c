/* A pool of sessions: memory of their own, told ends, errors. */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <orrery/session.h>

static char words[256];

static void serve(int connection, void *with) {
    char line[64];
    ssize_t length;
    while ((length = orrery_session_read(connection, line, sizeof line - 1)) > 0) {
        line[length] = 0;
        if (!strcmp(line, "exit"))
            exit(7);
        if (!strcmp(line, "abort"))
            abort();
        if (!strcmp(line, "spin"))
            for (;;)
                ;
        if (!strcmp(line, "wait for both"))
            orrery_session_wait(ORRERY_SESSION_READ | ORRERY_SESSION_WRITE);
        if (!strcmp(line, "wait for nothing"))
            snprintf(line, sizeof line, "%d", orrery_session_wait(0));
        strncat(words, line, sizeof words - strlen(words) - 1);
        if (orrery_session_write(connection, words, strlen(words)) != (ssize_t)strlen(words))
            return;
    }
    *(int *)with = 1;
}

/* Has the session answer; the answer is as expected, or the session ends as expected. */
static int ask(struct orrery_session_pool *pool, int client, uint64_t session, const char *line,
               const char *expected, struct orrery_session_result *end) {
    char answer[256] = "";
    CHECK(write(client, line, strlen(line)) == (ssize_t)strlen(line));
    int waits = orrery_session_step(pool, session, end);
    if (expected) {
        CHECK(waits > 0);
        CHECK(read(client, answer, sizeof answer - 1) == (ssize_t)strlen(expected));
        CHECK(!strcmp(answer, expected));
    }
    return waits;
}

int main(void) {
    int a[2], b[2], kept = open("/dev/null", O_RDONLY), with = 0;
    uint64_t first, second;
    struct orrery_session_result end = {0, 0};
    struct orrery_session_counts counts;
    struct orrery_session_options options = ORRERY_SESSION_OPTIONS_INIT;
    options.initial = 1;
    options.max_contexts = 2;
    options.spare = 1;
    options.step_limit_ms = 700;
    options.fds = &kept;
    options.fd_count = 1;
    CHECK(orrery_session_pool_create(&options, NULL, NULL) == NULL && errno == EINVAL && orrery_last_error());
    struct orrery_session_pool *pool = orrery_session_pool_create(&options, serve, &with);
    CHECK(pool);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, a) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, b) == 0);

    CHECK(orrery_session_begin(pool, a[1], &first, &end) == ORRERY_SESSION_READ);
    CHECK(orrery_session_begin(pool, b[1], &second, &end) == ORRERY_SESSION_READ);
    CHECK_ERROR(orrery_session_begin(pool, b[1], &second, &end), EAGAIN);
    CHECK(ask(pool, a[0], first, "red ", "red ", NULL) == ORRERY_SESSION_READ);
    CHECK(ask(pool, b[0], second, "green ", "green ", NULL) == ORRERY_SESSION_READ);
    CHECK(ask(pool, a[0], first, "blue ", "red blue ", NULL) == ORRERY_SESSION_READ);
    CHECK(ask(pool, b[0], second, "wait for nothing", "green -1", NULL) == ORRERY_SESSION_READ);
    CHECK(words[0] == 0);

    CHECK(ask(pool, a[0], first, "exit", NULL, &end) == 0);
    CHECK(end.how == ORRERY_SESSION_EXITED && end.value == 7);
    CHECK_ERROR(orrery_session_step(pool, first, NULL), ENOENT);
    CHECK(orrery_session_begin(pool, a[1], &first, &end) == ORRERY_SESSION_READ);
    CHECK(ask(pool, a[0], first, "new", "new", NULL) == ORRERY_SESSION_READ);
    CHECK(ask(pool, a[0], first, "wait for both", NULL, &end) ==
          (ORRERY_SESSION_READ | ORRERY_SESSION_WRITE));
    CHECK(orrery_session_abandon(pool, first) == 0);
    CHECK_ERROR(orrery_session_abandon(pool, first), ENOENT);
    CHECK(ask(pool, b[0], second, "abort", NULL, &end) == 0);
    CHECK(end.how == ORRERY_SESSION_SIGNALED && end.value == SIGABRT);
    while (orrery_session_pool_maintain(pool) > 0)
        ;
    CHECK(orrery_session_pool_count(pool, &counts) == 0);
    CHECK(counts.begun == 3 && counts.busy == 0 && counts.dirty == 0 && counts.lost == 1);

    CHECK(orrery_session_begin(pool, a[1], &first, NULL) == ORRERY_SESSION_READ);
    CHECK(ask(pool, a[0], first, "spin", NULL, &end) == 0 && end.how == ORRERY_SESSION_TIMED_OUT);
    CHECK(orrery_session_begin(pool, a[1], &first, NULL) == ORRERY_SESSION_READ);
    CHECK(shutdown(a[0], SHUT_WR) == 0);
    CHECK(orrery_session_step(pool, first, &end) == 0 && end.how == ORRERY_SESSION_RETURNED);
    CHECK(with == 0);

    CHECK_ERROR(orrery_session_wait(ORRERY_SESSION_READ), EINVAL);
    CHECK_ERROR(orrery_session_wait(17), EINVAL);
    CHECK_ERROR(orrery_session_step(NULL, first, NULL), EINVAL);
    CHECK_ERROR(orrery_session_begin(pool, -1, &first, NULL), EINVAL);
    CHECK_ERROR(orrery_session_begin(pool, 999, &first, NULL), EBADF);
    CHECK_ERROR(orrery_session_begin(pool, a[1], NULL, NULL), EINVAL);
    CHECK_ERROR(orrery_session_pool_count(pool, NULL), EINVAL);
    CHECK_ERROR(orrery_session_pool_serve(pool, -1, -1), EINVAL);
    orrery_session_pool_destroy(pool);
    orrery_session_pool_destroy(NULL);
    return 0;
}
