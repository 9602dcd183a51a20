/* A pool of sessions: memory of their own, told ends, errors. */
#include "check.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>

#include <orrery/sessions.h>

static char words[256];

static void serve(int connection, void *with) {
    char line[64];
    ssize_t length;
    while ((length = lw_session_read(connection, line, sizeof line - 1)) > 0) {
        line[length] = 0;
        if (!strcmp(line, "exit"))
            exit(7);
        if (!strcmp(line, "abort"))
            abort();
        if (!strcmp(line, "spin"))
            for (;;)
                ;
        if (!strcmp(line, "wait for both"))
            lw_session_wait(LW_SESSION_READ | LW_SESSION_WRITE);
        if (!strcmp(line, "wait for nothing"))
            snprintf(line, sizeof line, "%d", lw_session_wait(0));
        strncat(words, line, sizeof words - strlen(words) - 1);
        if (lw_session_write(connection, words, strlen(words)) != (ssize_t)strlen(words))
            return;
    }
    *(int *)with = 1;
}

/* Has the session answer; the answer is as expected, or the session ends as expected. */
static int ask(struct lw_sessions *pool, int client, uint64_t session, const char *line, const char *expected,
               struct lw_session_end *end) {
    char answer[256] = "";
    CHECK(write(client, line, strlen(line)) == (ssize_t)strlen(line));
    int waits = lw_session_step(pool, session, end);
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
    struct lw_session_end end = {0, 0};
    struct lw_sessions_counts counts;
    struct lw_sessions_settings settings = {0};
    settings.ready = 1;
    settings.most = 2;
    settings.spare = 1;
    settings.step_limit = 700;
    settings.keep = &kept;
    settings.keep_count = 1;
    CHECK(lw_sessions_open(&settings, NULL, NULL) == NULL && errno == EINVAL && lw_error());
    struct lw_sessions *pool = lw_sessions_open(&settings, serve, &with);
    CHECK(pool);
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, a) == 0 && socketpair(AF_UNIX, SOCK_STREAM, 0, b) == 0);

    CHECK(lw_session_begin(pool, a[1], &first, &end) == LW_SESSION_READ);
    CHECK(lw_session_begin(pool, b[1], &second, &end) == LW_SESSION_READ);
    CHECK_ERROR(lw_session_begin(pool, b[1], &second, &end), EAGAIN);
    CHECK(ask(pool, a[0], first, "red ", "red ", NULL) == LW_SESSION_READ);
    CHECK(ask(pool, b[0], second, "green ", "green ", NULL) == LW_SESSION_READ);
    CHECK(ask(pool, a[0], first, "blue ", "red blue ", NULL) == LW_SESSION_READ);
    CHECK(ask(pool, b[0], second, "wait for nothing", "green -1", NULL) == LW_SESSION_READ);
    CHECK(words[0] == 0);

    CHECK(ask(pool, a[0], first, "exit", NULL, &end) == 0);
    CHECK(end.how == LW_END_EXITED && end.value == 7);
    CHECK_ERROR(lw_session_step(pool, first, NULL), ENOENT);
    CHECK(lw_session_begin(pool, a[1], &first, &end) == LW_SESSION_READ);
    CHECK(ask(pool, a[0], first, "new", "new", NULL) == LW_SESSION_READ);
    CHECK(ask(pool, a[0], first, "wait for both", NULL, &end) == (LW_SESSION_READ | LW_SESSION_WRITE));
    CHECK(lw_session_end(pool, first) == 0);
    CHECK_ERROR(lw_session_end(pool, first), ENOENT);
    CHECK(ask(pool, b[0], second, "abort", NULL, &end) == 0);
    CHECK(end.how == LW_END_SIGNALED && end.value == SIGABRT);
    while (lw_sessions_tidy(pool) > 0)
        ;
    CHECK(lw_sessions_count(pool, &counts) == 0);
    CHECK(counts.begun == 3 && counts.busy == 0 && counts.dirty == 0 && counts.lost == 1);

    CHECK(lw_session_begin(pool, a[1], &first, NULL) == LW_SESSION_READ);
    CHECK(ask(pool, a[0], first, "spin", NULL, &end) == 0 && end.how == LW_END_TIMED_OUT);
    CHECK(lw_session_begin(pool, a[1], &first, NULL) == LW_SESSION_READ);
    CHECK(shutdown(a[0], SHUT_WR) == 0);
    CHECK(lw_session_step(pool, first, &end) == 0 && end.how == LW_END_RETURNED);
    CHECK(with == 0);

    CHECK_ERROR(lw_session_wait(LW_SESSION_READ), EINVAL);
    CHECK_ERROR(lw_session_wait(17), EINVAL);
    CHECK_ERROR(lw_session_step(NULL, first, NULL), EINVAL);
    CHECK_ERROR(lw_session_begin(pool, -1, &first, NULL), EINVAL);
    CHECK_ERROR(lw_session_begin(pool, 999, &first, NULL), EBADF);
    CHECK_ERROR(lw_session_begin(pool, a[1], NULL, NULL), EINVAL);
    CHECK_ERROR(lw_sessions_count(pool, NULL), EINVAL);
    CHECK_ERROR(lw_sessions_serve(pool, -1, -1), EINVAL);
    lw_sessions_close(pool);
    lw_sessions_close(NULL);
    return 0;
}
