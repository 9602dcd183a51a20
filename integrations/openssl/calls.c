/*
 * Calls of the vault; its start, and its start again.
 */
#include "policy.h"
#include "provider.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <orrery/vault.h>

/* Whether memory can be written to a swap partition or file: /proc/swaps has a line beside its header. */
static bool machine_swaps(void) {
    char line[512];
    FILE *swaps = fopen("/proc/swaps", "re");
    bool any = swaps && fgets(line, sizeof line, swaps) && fgets(line, sizeof line, swaps);
    if (swaps)
        fclose(swaps);
    return any;
}

/* Starts one, as the configuration says. */
static struct orrery_vault *start(const struct provider *provider) {
    char grace[64], allow[256];
    const char *arguments[5] = {"orrery-vault"};
    unsigned allowed;
    size_t count = 1;
    if (provider->grace) {
        snprintf(grace, sizeof grace, "grace=%s", provider->grace);
        arguments[count++] = grace;
    }
    if (provider->signer && !strcmp(provider->signer, "openssl")) {
        arguments[count++] = "signer=openssl";
    } else if (provider->signer) {
        RAISE(provider, REASON_PARAMETER, "signer = %s: it may be openssl, or not be there",
              provider->signer);
        return NULL;
    }
    if (provider->allow) {
        if (!policy_parse(provider->allow, &allowed) || strlen(provider->allow) >= sizeof allow - 6) {
            RAISE(provider, REASON_PARAMETER, "allow = %s: it may be a list of " POLICY_WORDS,
                  provider->allow);
            return NULL;
        }
        snprintf(allow, sizeof allow, "allow=%s", provider->allow);
        arguments[count++] = allow;
    }
    struct orrery_vault *vault = orrery_vault_spawn(provider->program, arguments);
    if (!vault)
        RAISE(provider, REASON_VAULT, "%s", orrery_last_error());
    else if (!orrery_vault_is_locked(vault) && machine_swaps())
        fprintf(stderr,
                "orrery: warning: cannot lock the vault's memory, so keys may reach the swap partition: "
                "start the program with CAP_IPC_LOCK, or raise RLIMIT_MEMLOCK (ulimit -l)\n");
    return vault;
}

/* The vault; started if there is none, or if the one there is is `broken`. */
static struct orrery_vault *vault_of(struct provider *provider, const struct orrery_vault *broken) {
    CRYPTO_THREAD_write_lock(provider->lock);
    struct orrery_vault *vault = provider->vault;
    if (vault == broken) {
        vault = start(provider);
        /* A broken one is left alone: other threads may be about to notice. */
        if (vault)
            provider->vault = vault;
    }
    CRYPTO_THREAD_unlock(provider->lock);
    return vault;
}

/*
 * Loads the key into this vault; 1 if it is there, 0 if it cannot be, -1 if the vault is gone. `*for_us` tells whether it
 * was loaded now, and not before for somebody else.
 */
static int load_into(const struct orrery_vault *vault, const struct key *key, bool *for_us) {
    struct load_request header = {strlen(key->path), key->encoded_length};
    size_t length = sizeof header + header.path_length + header.public_length;
    char *request = malloc(length), answer[1024];
    *for_us = false;
    if (!request)
        return 0;
    memcpy(request, &header, sizeof header);
    memcpy(request + sizeof header, key->path, header.path_length);
    memcpy(request + sizeof header + header.path_length, key->encoded, header.public_length);
    ssize_t said = orrery_vault_load(vault, request, length, answer, sizeof answer);
    int error = errno;
    free(request);
    *for_us = said == 0;
    if (said == 0)
        return 1;
    if (said > 0) {
        RAISE(key->provider, REASON_KEY, "%.*s", (int)said, answer);
        return 0;
    }
    if (error == EOWNERDEAD)
        return -1;
    if (error == EPERM) {
        /* A worker that reads its configuration again: what root had loaded is there. */
        struct call_request known = {.operation = OPERATION_KNOWN};
        memcpy(known.key, key->fingerprint, FINGERPRINT);
        if (orrery_vault_call(vault, &known, sizeof known, NULL, 0) == 0)
            return 1;
        RAISE(key->provider, REASON_KEY,
              "this user may not have the vault load %s: load it before changing the user", key->path);
        return 0;
    }
    RAISE(key->provider, REASON_VAULT, "loading %s: %s", key->path, orrery_last_error());
    return 0;
}

void vault_give_up(const struct key *key) {
    struct provider *provider = key->provider;
    if (atomic_load(&provider->owner) != getpid())
        return;
    CRYPTO_THREAD_write_lock(provider->lock);
    struct orrery_vault *vault = provider->vault;
    CRYPTO_THREAD_unlock(provider->lock);
    /* One that was started since never loaded it for this key. */
    if (vault != key->vault)
        return;
    struct {
        struct load_request header;
        unsigned char fingerprint[FINGERPRINT];
    } request = {.header = {0, FINGERPRINT}};
    memcpy(request.fingerprint, key->fingerprint, FINGERPRINT);
    char answer[1];
    /* Should it fail, the key stays until the vault ends. */
    (void)!orrery_vault_load(vault, &request, sizeof request, answer, sizeof answer);
}

bool vault_load(struct key *key) {
    struct orrery_vault *vault = NULL;
    for (int attempt = 0; attempt < 2; attempt++) {
        struct orrery_vault *next = vault_of(key->provider, vault);
        if (!next)
            return false;
        vault = next;
        bool may_give_up;
        int loaded = load_into(vault, key, &may_give_up);
        if (loaded == 1 && may_give_up) {
            key->vault = vault;
            atomic_store(&key->provider->owner, getpid());
        }
        if (loaded >= 0)
            return loaded;
    }
    RAISE(key->provider, REASON_VAULT, "the vault died while it loaded %s", key->path);
    return false;
}

ssize_t vault_call(const struct key *key, struct call_request *call, const void *label, const void *data,
                   size_t length, void *answer, size_t room) {
    unsigned char small[1024], *request = small;
    size_t total = sizeof *call + call->label_length + length;
    struct provider *provider = key->provider;
    if (!key->path) {
        RAISE(provider, REASON_OPERATION, "this needs a private key, and the key is a public one");
        return -1;
    }
    if (total > ORRERY_VAULT_MESSAGE_MAX) {
        RAISE(provider, REASON_OPERATION, "%zu bytes are more than a vault takes at once (%d)", length,
              ORRERY_VAULT_MESSAGE_MAX - (int)sizeof *call);
        return -1;
    }
    if (total > sizeof small && !(request = malloc(total)))
        return -1;
    memcpy(call->key, key->fingerprint, FINGERPRINT);
    memcpy(request, call, sizeof *call);
    if (call->label_length)
        memcpy(request + sizeof *call, label, call->label_length);
    if (length)
        memcpy(request + sizeof *call + call->label_length, data, length);

    struct orrery_vault *vault = vault_of(provider, NULL);
    ssize_t result = vault ? orrery_vault_call(vault, request, total, answer, room) : -1;
    int error = errno;
    if (vault && result < 0 && (error == EOWNERDEAD || error == ENOKEY)) {
        /* Keeper and spare were killed. Who may read the key file can do without them. */
        struct orrery_vault *next = error == EOWNERDEAD ? vault_of(provider, vault) : vault;
        bool for_us;
        if (next && load_into(next, key, &for_us) == 1) {
            result = orrery_vault_call(next, request, total, answer, room);
            error = errno;
        }
    }
    if (result < 0 && vault) {
        if (error == EACCES)
            RAISE(provider, REASON_POLICY,
                  "it needs allow = %s in the provider's section of the configuration", policy_word(call));
        else if (error == EBADMSG)
            RAISE(provider, REASON_OPERATION, "the vault refuses to work with these data and parameters");
        else
            RAISE(provider, REASON_VAULT, "%s", orrery_last_error());
    }
    if (request != small)
        free(request);
    return result;
}
