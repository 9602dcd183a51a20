/* Vaults that processes share: loading, calls, twins, programs started as vaults, deaths, errors. */
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include <orrery/vault.h>

struct secrets {
    char key[64];
    size_t length;
};

static ssize_t load(void *context, const void *request, size_t length, void *answer, size_t room) {
    struct secrets *secrets = context;
    if (length > sizeof secrets->key)
        return -E2BIG;
    memcpy(secrets->key, request, length);
    secrets->length = length;
    return snprintf(answer, room, "loaded %zu", length);
}

/* The sum of the key's and the request's bytes; or what the request asks for. */
static ssize_t serve(void *context, const void *request, size_t length, void *answer, size_t room) {
    struct secrets *secrets = context;
    const unsigned char *bytes = request;
    unsigned long sum = 0;
    if (length == 3 && !memcmp(request, "pid", 3))
        return snprintf(answer, room, "%d", getpid());
    if (length == 4 && !memcmp(request, "fail", 4))
        return -EDOM;
    if (length == 4 && !memcmp(request, "long", 4))
        return (ssize_t)room + 1;
    for (size_t i = 0; i < length; i++)
        sum += bytes[i];
    for (size_t i = 0; i < secrets->length; i++)
        sum += (unsigned char)secrets->key[i];
    return snprintf(answer, room, "%lu", sum);
}

static unsigned long ask(const struct orrery_vault *vault, const char *request) {
    char answer[64] = "";
    ssize_t length = orrery_vault_call(vault, request, strlen(request), answer, sizeof answer);
    CHECK(length > 0 && (size_t)length == strlen(answer));
    return strtoul(answer, NULL, 10);
}

static void *many(void *vault) {
    for (int i = 0; i < 200; i++)
        CHECK(ask(vault, "ab") == 'a' + 'b' + 3);
    return NULL;
}

static void wait_for(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void use(struct orrery_vault *vault) {
    char answer[64] = "";
    CHECK(ask(vault, "ab") == 'a' + 'b');
    CHECK(orrery_vault_load(vault, "\1\2", 2, answer, sizeof answer) == 8 && !strcmp(answer, "loaded 2"));
    CHECK(ask(vault, "ab") == 'a' + 'b' + 3);
    unsigned long twin = ask(vault, "pid");
    CHECK(twin != (unsigned long)getpid());

    pid_t child = fork();
    if (child == 0) {
        CHECK(ask(vault, "c") == 'c' + 3);
        CHECK(ask(vault, "pid") != twin);
        _exit(0);
    }
    wait_for(child);
    CHECK(ask(vault, "pid") == twin);
    kill((pid_t)twin, SIGKILL);
    CHECK(ask(vault, "c") == 'c' + 3);

    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, many, vault) == 0);
    for (int i = 0; i < 4; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
}

static void errors(struct orrery_vault *vault) {
    static char large[ORRERY_VAULT_MESSAGE_MAX + 1];
    char answer[64];
    CHECK_ERROR(orrery_vault_call(vault, "fail", 4, answer, sizeof answer), EDOM);
    CHECK_ERROR(orrery_vault_call(vault, "long", 4, answer, sizeof answer), EMSGSIZE);
    CHECK_ERROR(orrery_vault_call(vault, "pid", 3, answer, 0), EMSGSIZE);
    CHECK_ERROR(orrery_vault_call(vault, large, sizeof large, answer, sizeof answer), EMSGSIZE);
    CHECK_ERROR(orrery_vault_call(NULL, "pid", 3, answer, sizeof answer), EINVAL);
    CHECK_ERROR(orrery_vault_call(vault, NULL, 3, answer, sizeof answer), EINVAL);
    CHECK_ERROR(orrery_vault_load(vault, large, 65, answer, sizeof answer), E2BIG);
    CHECK_ERROR(orrery_vault_load(vault, large, ORRERY_VAULT_LOAD_MAX + 1, answer, sizeof answer), EMSGSIZE);
    CHECK_ERROR(orrery_vault_load(vault, "x", 1, answer, 2), EMSGSIZE);
    CHECK(ask(vault, "c") == 'c' + 'x');
    CHECK(!orrery_vault_create(NULL, serve, NULL) && errno == EINVAL);
    CHECK(!orrery_vault_spawn(NULL, NULL) && errno == EINVAL);
    const char *arguments[] = {"nothing", NULL};
    CHECK(!orrery_vault_spawn("/nowhere/nothing", arguments) && errno == ENOENT);
    CHECK(strstr(orrery_last_error(), "/nowhere/nothing"));
    /* A program that is no vault. */
    CHECK(!orrery_vault_spawn("/bin/true", arguments) && errno == EOWNERDEAD);
    orrery_vault_close(NULL);
}

int main(int count, char **arguments) {
    struct secrets secrets = {.length = 0};
    if (count == 2 && !strcmp(arguments[1], "vault")) {
        orrery_vault_run(load, serve, &secrets);
        return 1;
    }
    CHECK(orrery_vault_run(load, serve, &secrets) == -1 && errno == ENOTSOCK);

    struct orrery_vault *forked = orrery_vault_create(load, serve, &secrets);
    CHECK(forked);
    use(forked);
    errors(forked);
    CHECK(secrets.length == 0);
    orrery_vault_close(forked);

    char program[4096] = "";
    CHECK(readlink("/proc/self/exe", program, sizeof program - 1) > 0);
    const char *as_vault[] = {"program", "vault", NULL};
    struct orrery_vault *started = orrery_vault_spawn(program, as_vault);
    CHECK(started);
    use(started);
    orrery_vault_close(started);
    return 0;
}
