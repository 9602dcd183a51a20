/*
 * orrery-vault: the program in which private keys live. The provider starts it; nobody else does.
 *
 * It reads key files, and signs and decrypts with them: through AWS-LC where that has the kind of signature, else, or where it is
 * told so, through OpenSSL's default provider.
 *
 *     orrery-vault [grace=SECONDS] [signer=openssl] [allow=LIST]
 */
#include "policy.h"
#include "signer.h"
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/rsa.h>
#include <openssl/sha.h>
#include <openssl/x509.h>

#include <orrery/vault.h>

struct key {
    unsigned char fingerprint[FINGERPRINT];
    EVP_PKEY *pkey;
    struct signer *signer; /* NULL where OpenSSL signs */
    int hashes;            /* it signs messages, not digests */
    unsigned wanted;       /* how many times it was loaded and not given up since */
    long long until;       /* when it is dropped, in milliseconds; 0 while it is wanted */
};

/* What was set up for an earlier call like this one: setting up costs as much as a small signature. */
struct prepared {
    struct call_request like;
    EVP_PKEY_CTX *context;
};

#define PREPARED 16

struct keys {
    struct key *all;
    size_t count;
    struct prepared prepared[PREPARED];
    size_t next;
    long long grace;  /* for how long a key stays that nobody wants, in milliseconds */
    int only_openssl; /* it makes all signatures */
    unsigned allowed; /* beside what always is (policy.h) */
};

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000LL + time.tv_nsec / 1000000;
}

static struct key *find(const struct keys *keys, const unsigned char *fingerprint) {
    for (size_t i = 0; i < keys->count; i++)
        if (!memcmp(keys->all[i].fingerprint, fingerprint, FINGERPRINT))
            return &keys->all[i];
    return NULL;
}

/* Asked for a passphrase: there is nobody to ask. */
static int no_passphrase(char *buffer, int size, int writing, void *asked) {
    (void)buffer, (void)size, (void)writing;
    *(int *)asked = 1;
    return -1;
}

/* Takes the key out of a file; NULL with the reason in `why`. */
static EVP_PKEY *read_key(const char *path, char *why, size_t room) {
    FILE *file = fopen(path, "re");
    if (!file) {
        snprintf(why, room, "cannot open the private key %s: %s", path, strerror(errno));
        return NULL;
    }
    /* No copy of it stays in a buffer. */
    setvbuf(file, NULL, _IONBF, 0);
    int asked = 0;
    EVP_PKEY *pkey = PEM_read_PrivateKey(file, NULL, no_passphrase, &asked);
    fclose(file);
    if (!pkey && asked)
        snprintf(why, room,
                 "the private key %s has a passphrase, for which a vault cannot ask: remove it "
                 "(openssl pkey) and let only root read the file",
                 path);
    else if (!pkey)
        snprintf(why, room, "%s has no private key in PEM: %s", path,
                 ERR_reason_error_string(ERR_peek_last_error()));
    return pkey;
}

/* AWS-LC's of the key, if it can have it. */
static struct signer *signer_of(EVP_PKEY *pkey) {
    PKCS8_PRIV_KEY_INFO *info = EVP_PKEY2PKCS8(pkey);
    unsigned char *encoded = NULL;
    int length = info ? i2d_PKCS8_PRIV_KEY_INFO(info, &encoded) : -1;
    struct signer *signer = length > 0 ? orrery_signer_new(encoded, length) : NULL;
    OPENSSL_clear_free(encoded, length > 0 ? length : 0);
    PKCS8_PRIV_KEY_INFO_free(info);
    return signer;
}

/* One who had a key loaded wants it no more. */
static ssize_t give_up(struct keys *keys, const void *fingerprint) {
    struct key *key = find(keys, fingerprint);
    if (key && key->wanted && --key->wanted == 0)
        key->until = now() + keys->grace;
    return 0;
}

static void drop(struct keys *keys, struct key *key) {
    for (size_t i = 0; i < PREPARED; i++)
        if (keys->prepared[i].context && !memcmp(keys->prepared[i].like.key, key->fingerprint, FINGERPRINT)) {
            EVP_PKEY_CTX_free(keys->prepared[i].context);
            keys->prepared[i].context = NULL;
        }
    orrery_signer_free(key->signer);
    EVP_PKEY_free(key->pkey);
    *key = keys->all[--keys->count];
}

/* Drops the keys whose time is up, one at a call; tells when the next one's is. */
static long tidy(void *context) {
    struct keys *keys = context;
    long long next = -1, present = now();
    for (size_t i = 0; i < keys->count; i++) {
        struct key *key = &keys->all[i];
        if (key->until && key->until <= present) {
            drop(keys, key);
            return 0;
        }
        if (key->until && (next < 0 || key->until - present < next))
            next = key->until - present;
    }
    return next;
}

static ssize_t load(void *context, const void *request, size_t length, void *answer, size_t room) {
    struct keys *keys = context;
    struct load_request header;
    if (length < sizeof header)
        return -EINVAL;
    memcpy(&header, request, sizeof header);
    const char *rest = (const char *)request + sizeof header;
    length -= sizeof header;
    if (header.path_length > length || header.public_length != length - header.path_length)
        return -EINVAL;
    if (!header.path_length)
        return header.public_length == FINGERPRINT ? give_up(keys, rest) : -EINVAL;

    char *path = strndup(rest, header.path_length);
    if (!path)
        return -ENOMEM;
    ERR_clear_error();
    char *why = answer;
    why[0] = 0;
    EVP_PKEY *pkey = read_key(path, why, room);
    unsigned char *encoded = NULL;
    int encoded_length = pkey ? i2d_PUBKEY(pkey, &encoded) : -1;
    if (pkey && encoded_length < 0)
        snprintf(why, room, "the private key %s has no public one", path);
    if (pkey && encoded_length >= 0) {
        struct key new = {.pkey = pkey, .wanted = 1, .hashes = EVP_PKEY_is_a(pkey, "ED25519")}, *known;
        SHA256(encoded, encoded_length, new.fingerprint);
        if ((size_t)encoded_length != header.public_length ||
            memcmp(encoded, rest + header.path_length, header.public_length)) {
            snprintf(why, room,
                     "the private key %s is not the one that was wrapped: wrap it again (orrery vault wrap)",
                     path);
        } else if ((known = find(keys, new.fingerprint))) {
            known->wanted++;
            known->until = 0;
        } else {
            struct key *all = realloc(keys->all, (keys->count + 1) * sizeof *all);
            if (all) {
                new.signer = keys->only_openssl ? NULL : signer_of(pkey);
                all[keys->count++] = new;
                keys->all = all;
                pkey = NULL;
            } else {
                snprintf(why, room, "out of memory");
            }
        }
    }
    OPENSSL_free(encoded);
    EVP_PKEY_free(pkey);
    free(path);
    return strlen(why);
}

static const char *name_or_null(const char *name) { return *name ? name : NULL; }

/* Sets the parameters of RSA; those that do not apply are left out. */
static int set_rsa(EVP_PKEY_CTX *context, const struct call_request *call, const void *label) {
    OSSL_PARAM params[8], *param = params;
    int padding = call->padding, salt = call->salt;
    unsigned client = call->client_version, negotiated = call->negotiated_version;
    char *mask = (char *)name_or_null(call->mask_digest), *digest = (char *)name_or_null(call->digest);
    int signing = call->operation == OPERATION_SIGN;
    if (padding)
        *param++ = OSSL_PARAM_construct_int(OSSL_PKEY_PARAM_PAD_MODE, &padding);
    if (signing && padding == RSA_PKCS1_PSS_PADDING)
        *param++ = OSSL_PARAM_construct_int(OSSL_SIGNATURE_PARAM_PSS_SALTLEN, &salt);
    if (mask)
        *param++ = OSSL_PARAM_construct_utf8_string(OSSL_PKEY_PARAM_MGF1_DIGEST, mask, 0);
    if (!signing && digest)
        *param++ = OSSL_PARAM_construct_utf8_string(OSSL_ASYM_CIPHER_PARAM_OAEP_DIGEST, digest, 0);
    if (!signing && call->label_length)
        *param++ = OSSL_PARAM_construct_octet_string(OSSL_ASYM_CIPHER_PARAM_OAEP_LABEL, (void *)label,
                                                     call->label_length);
    if (padding == RSA_PKCS1_WITH_TLS_PADDING) {
        *param++ = OSSL_PARAM_construct_uint(OSSL_ASYM_CIPHER_PARAM_TLS_CLIENT_VERSION, &client);
        *param++ = OSSL_PARAM_construct_uint(OSSL_ASYM_CIPHER_PARAM_TLS_NEGOTIATED_VERSION, &negotiated);
    }
    *param = OSSL_PARAM_construct_end();
    return EVP_PKEY_CTX_set_params(context, params) > 0;
}

static EVP_PKEY_CTX *prepare(const struct key *key, const struct call_request *call, const void *label) {
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_pkey(NULL, key->pkey, NULL);
    int rsa = EVP_PKEY_is_a(key->pkey, "RSA") || EVP_PKEY_is_a(key->pkey, "RSA-PSS");
    int good = context != NULL;
    if (good && call->operation == OPERATION_DECRYPT)
        good = EVP_PKEY_decrypt_init(context) > 0;
    else if (good)
        good = EVP_PKEY_sign_init(context) > 0;
    if (good && call->operation == OPERATION_SIGN && *call->digest) {
        OSSL_PARAM digest[] = {
            OSSL_PARAM_construct_utf8_string(OSSL_SIGNATURE_PARAM_DIGEST, (char *)call->digest, 0),
            OSSL_PARAM_END};
        good = EVP_PKEY_CTX_set_params(context, digest) > 0;
    }
    if (good && rsa)
        good = set_rsa(context, call, label);
    if (good)
        return context;
    EVP_PKEY_CTX_free(context);
    return NULL;
}

/* A context for such calls, from the last ones if possible; `*keep` tells whether it stays ours. */
static EVP_PKEY_CTX *context_of(struct keys *keys, const struct key *key, const struct call_request *call,
                                const void *label, int *keep) {
    *keep = call->label_length == 0;
    if (!*keep)
        return prepare(key, call, label);
    for (size_t i = 0; i < PREPARED; i++)
        if (keys->prepared[i].context && !memcmp(&keys->prepared[i].like, call, sizeof *call))
            return keys->prepared[i].context;
    EVP_PKEY_CTX *context = prepare(key, call, label);
    if (context) {
        struct prepared *place = &keys->prepared[keys->next++ % PREPARED];
        EVP_PKEY_CTX_free(place->context);
        *place = (struct prepared){*call, context};
    }
    return context;
}

/* Signs a whole message, for keys that hash by themselves. */
static ssize_t sign_message(const struct key *key, const void *data, size_t length, void *answer,
                            size_t room) {
    EVP_MD_CTX *context = EVP_MD_CTX_new();
    int good = context && EVP_DigestSignInit_ex(context, NULL, NULL, NULL, NULL, key->pkey, NULL) > 0 &&
               EVP_DigestSign(context, answer, &room, data, length) > 0;
    EVP_MD_CTX_free(context);
    return good ? (ssize_t)room : -EBADMSG;
}

/* The signature's length, or 0 where OpenSSL has to make it. */
static size_t sign_quickly(const struct key *key, const struct call_request *call, const void *data,
                           size_t length, void *answer, size_t room) {
    /* Another digest for the mask than for the data is OpenSSL's business. */
    if (!key->signer || (*call->mask_digest && strcmp(call->mask_digest, call->digest)))
        return 0;
    return orrery_signer_sign(key->signer, call->digest, call->padding, call->salt, data, length, answer,
                              room);
}

static ssize_t serve(void *context, const void *request, size_t length, void *answer, size_t room) {
    struct keys *keys = context;
    struct call_request call;
    if (length < sizeof call)
        return -EINVAL;
    memcpy(&call, request, sizeof call);
    const char *label = (const char *)request + sizeof call;
    length -= sizeof call;
    if (call.label_length > length || memchr(call.digest, 0, DIGEST_NAME) == NULL ||
        memchr(call.mask_digest, 0, DIGEST_NAME) == NULL)
        return -EINVAL;
    const void *data = label + call.label_length;
    length -= call.label_length;

    struct key *key = find(keys, call.key);
    if (!key)
        return -ENOKEY;
    if (call.operation == OPERATION_KNOWN)
        return 0;
    if (call.operation != OPERATION_SIGN && call.operation != OPERATION_DECRYPT)
        return -EINVAL;
    if (policy_needed(key->pkey, &call, data, length) & ~keys->allowed)
        return -EACCES;
    size_t quickly =
        call.operation == OPERATION_SIGN ? sign_quickly(key, &call, data, length, answer, room) : 0;
    if (quickly)
        return quickly;
    ERR_clear_error();
    if (call.operation == OPERATION_SIGN && key->hashes)
        return sign_message(key, data, length, answer, room);
    int keep;
    EVP_PKEY_CTX *with = context_of(keys, key, &call, label, &keep);
    if (!with)
        return -EBADMSG;
    int good = call.operation == OPERATION_SIGN ? EVP_PKEY_sign(with, answer, &room, data, length)
                                                : EVP_PKEY_decrypt(with, answer, &room, data, length);
    if (!keep)
        EVP_PKEY_CTX_free(with);
    return good > 0 ? (ssize_t)room : -EBADMSG;
}

int main(int count, char **arguments) {
    static struct keys keys = {.grace = 60 * 1000};
    for (int i = 1; i < count; i++) {
        if (!strncmp(arguments[i], "grace=", 6))
            keys.grace = atoll(arguments[i] + 6) * 1000;
        else if (!strcmp(arguments[i], "signer=openssl"))
            keys.only_openssl = 1;
        else if (strncmp(arguments[i], "allow=", 6) || !policy_parse(arguments[i] + 6, &keys.allowed)) {
            fprintf(stderr, "orrery-vault: unknown argument %s\n", arguments[i]);
            return 2;
        }
    }
    /* Its own configuration could name our provider, and so start a vault of the vault. */
    OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_LOAD_CRYPTO_STRINGS, NULL);
    orrery_vault_run_with_cleanup(load, serve, tidy, &keys);
    fprintf(stderr, "orrery-vault: %s\n", orrery_last_error());
    return 2;
}
