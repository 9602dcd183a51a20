/*
 * Signatures: data are hashed here, the digest is signed in the vault. Ed25519 hashes by itself, so the vault gets the
 * whole message. Verifying needs no private key and is left to the default provider.
 */
#include "parameters.h"

#include <string.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/params.h>
#include <openssl/rsa.h>

struct signing {
    struct provider *provider;
    struct key *key;
    bool rsa;
    struct call_request call; /* the parameters */
    EVP_MD *digest;
    EVP_MD_CTX *hash;
};

static void *signing_new(void *provider, const char *properties) {
    (void)properties;
    struct signing *signing = OPENSSL_zalloc(sizeof *signing);
    if (signing)
        signing->provider = provider;
    return signing;
}

static void signing_free(void *context) {
    struct signing *signing = context;
    key_free(signing->key);
    EVP_MD_free(signing->digest);
    EVP_MD_CTX_free(signing->hash);
    OPENSSL_free(signing);
}

static void *signing_dup(void *context) {
    struct signing *from = context, *to = OPENSSL_memdup(from, sizeof *from);
    if (!to)
        return NULL;
    to->hash = NULL;
    if (to->key)
        key_up(to->key);
    if (to->digest)
        EVP_MD_up_ref(to->digest);
    if (from->hash && (!(to->hash = EVP_MD_CTX_new()) || !EVP_MD_CTX_copy_ex(to->hash, from->hash))) {
        signing_free(to);
        return NULL;
    }
    return to;
}

static int set_ctx_params(void *context, const OSSL_PARAM params[]);

/* Remembers the digest; it is fetched when data come. */
static bool set_digest(struct signing *signing, const char *name) {
    if (strlen(name) >= DIGEST_NAME) {
        RAISE(signing->provider, REASON_PARAMETER, "digest %s", name);
        return false;
    }
    if (strcmp(signing->call.digest, name)) {
        memset(signing->call.digest, 0, DIGEST_NAME);
        strcpy(signing->call.digest, name);
        EVP_MD_free(signing->digest);
        signing->digest = NULL;
    }
    return true;
}

static const EVP_MD *digest_of(struct signing *signing) {
    if (!signing->digest && *signing->call.digest &&
        !(signing->digest = digest_named(signing->provider, signing->call.digest)))
        RAISE(signing->provider, REASON_PARAMETER, "digest %s", signing->call.digest);
    return signing->digest;
}

static int init(void *context, void *key, const OSSL_PARAM params[]) {
    struct signing *signing = context;
    if (key && key != signing->key) {
        key_up(key);
        key_free(signing->key);
        signing->key = key;
    }
    if (!signing->key || !signing->key->public)
        return 0;
    signing->rsa = signing->key->rsa;
    if (key) {
        signing->call.padding = signing->key->pss ? RSA_PKCS1_PSS_PADDING
                                : signing->rsa    ? RSA_PKCS1_PADDING
                                                  : 0;
        signing->call.salt = RSA_PSS_SALTLEN_AUTO;
    }
    return set_ctx_params(signing, params);
}

/* An ordinary context with the same parameters, for what the default provider can do. */
static EVP_PKEY_CTX *ordinary(struct signing *signing) {
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_pkey(signing->provider->plain, signing->key->public, NULL);
    const struct call_request *call = &signing->call;
    int padding = call->padding, salt = call->salt;
    OSSL_PARAM params[5], *param = params;
    if (*call->digest)
        *param++ = OSSL_PARAM_construct_utf8_string(OSSL_SIGNATURE_PARAM_DIGEST, (char *)call->digest, 0);
    if (signing->rsa)
        *param++ = OSSL_PARAM_construct_int(OSSL_SIGNATURE_PARAM_PAD_MODE, &padding);
    if (signing->rsa && padding == RSA_PKCS1_PSS_PADDING)
        *param++ = OSSL_PARAM_construct_int(OSSL_SIGNATURE_PARAM_PSS_SALTLEN, &salt);
    if (*call->mask_digest)
        *param++ =
            OSSL_PARAM_construct_utf8_string(OSSL_SIGNATURE_PARAM_MGF1_DIGEST, (char *)call->mask_digest, 0);
    *param = OSSL_PARAM_construct_end();
    if (context && EVP_PKEY_verify_init(context) > 0 &&
        (param == params || EVP_PKEY_CTX_set_params(context, params) > 0))
        return context;
    EVP_PKEY_CTX_free(context);
    return NULL;
}

static int sign(void *context, unsigned char *signature, size_t *length, size_t room,
                const unsigned char *data, size_t data_length) {
    struct signing *signing = context;
    *length = EVP_PKEY_get_size(signing->key->public);
    if (!signature)
        return 1;
    signing->call.operation = OPERATION_SIGN;
    ssize_t done = vault_call(signing->key, &signing->call, NULL, data, data_length, signature, room);
    if (done < 0)
        return 0;
    *length = done;
    return 1;
}

static int verify(void *context, const unsigned char *signature, size_t length, const unsigned char *data,
                  size_t data_length) {
    struct signing *signing = context;
    EVP_PKEY_CTX *with = ordinary(signing);
    int good = with && EVP_PKEY_verify(with, signature, length, data, data_length) > 0;
    EVP_PKEY_CTX_free(with);
    return good;
}

static int digest_init(void *context, const char *digest, void *key, const OSSL_PARAM params[]) {
    struct signing *signing = context;
    if (!init(context, key, NULL) || (digest && *digest && !set_digest(signing, digest)) ||
        !set_ctx_params(context, params))
        return 0;
    const EVP_MD *with = digest_of(signing);
    if (!signing->hash)
        signing->hash = EVP_MD_CTX_new();
    return with && signing->hash && EVP_DigestInit_ex2(signing->hash, with, NULL);
}

static int digest_update(void *context, const unsigned char *data, size_t length) {
    struct signing *signing = context;
    return signing->hash && EVP_DigestUpdate(signing->hash, data, length);
}

static int digest_sign_final(void *context, unsigned char *signature, size_t *length, size_t room) {
    struct signing *signing = context;
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    if (signature && (!signing->hash || !EVP_DigestFinal_ex(signing->hash, digest, &size)))
        return 0;
    return sign(context, signature, length, room, digest, size);
}

/* All at once, as TLS does: no context is copied. */
static int digest_sign(void *context, unsigned char *signature, size_t *length, size_t room,
                       const unsigned char *data, size_t data_length) {
    if (signature && !digest_update(context, data, data_length))
        return 0;
    return digest_sign_final(context, signature, length, room);
}

static int digest_verify_final(void *context, const unsigned char *signature, size_t length) {
    struct signing *signing = context;
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned size = 0;
    return signing->hash && EVP_DigestFinal_ex(signing->hash, digest, &size) &&
           verify(context, signature, length, digest, size);
}

/* Ed25519: all at once. */
static int message_init(void *context, const char *digest, void *key, const OSSL_PARAM params[]) {
    struct signing *signing = context;
    if (digest && *digest) {
        RAISE(signing->provider, REASON_PARAMETER, "digest %s: Ed25519 has one of its own", digest);
        return 0;
    }
    return init(context, key, params);
}

static int message_verify(void *context, const unsigned char *signature, size_t length,
                          const unsigned char *data, size_t data_length) {
    struct signing *signing = context;
    EVP_MD_CTX *with = EVP_MD_CTX_new();
    int good = with &&
               EVP_DigestVerifyInit_ex(with, NULL, NULL, signing->provider->plain, NULL, signing->key->public,
                                       NULL) > 0 &&
               EVP_DigestVerify(with, signature, length, data, data_length) > 0;
    EVP_MD_CTX_free(with);
    return good;
}

static int get_ctx_params(void *context, OSSL_PARAM params[]) {
    struct signing *signing = context;
    OSSL_PARAM *param = OSSL_PARAM_locate(params, OSSL_SIGNATURE_PARAM_DIGEST);
    if (param && !OSSL_PARAM_set_utf8_string(param, signing->call.digest))
        return 0;
    param = OSSL_PARAM_locate(params, OSSL_SIGNATURE_PARAM_PAD_MODE);
    if (param && !put_padding(param, signing->call.padding))
        return 0;
    OSSL_PARAM *others[] = {
        OSSL_PARAM_locate(params, OSSL_SIGNATURE_PARAM_ALGORITHM_ID),
        OSSL_PARAM_locate(params, OSSL_SIGNATURE_PARAM_PSS_SALTLEN),
        OSSL_PARAM_locate(params, OSSL_SIGNATURE_PARAM_MGF1_DIGEST),
    };
    if (!others[0] && !others[1] && !others[2])
        return 1;
    EVP_PKEY_CTX *with = NULL;
    EVP_MD_CTX *hash = NULL;
    if (signing->rsa || *signing->call.digest) {
        with = ordinary(signing);
    } else if ((hash = EVP_MD_CTX_new())) {
        /* Contexts of Ed25519 know their algorithm only once they verify messages. */
        EVP_DigestVerifyInit_ex(hash, &with, NULL, signing->provider->plain, NULL, signing->key->public,
                                NULL);
    }
    int done = with != NULL;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (done && others[i]) {
            OSSL_PARAM one[] = {*others[i], OSSL_PARAM_END};
            done = EVP_PKEY_CTX_get_params(with, one) > 0;
            others[i]->return_size = one->return_size;
        }
    if (hash)
        EVP_MD_CTX_free(hash);
    else
        EVP_PKEY_CTX_free(with);
    return done;
}

static int set_ctx_params(void *context, const OSSL_PARAM params[]) {
    struct signing *signing = context;
    struct call_request *call = &signing->call;
    char digest[DIGEST_NAME];
    const OSSL_PARAM *param;
    if (!params)
        return 1;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_SIGNATURE_PARAM_DIGEST)) &&
        (!get_digest(signing->provider, param, digest) || !set_digest(signing, digest)))
        return 0;
    if (!signing->rsa)
        return 1;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_SIGNATURE_PARAM_PAD_MODE)) &&
        !get_padding(signing->provider, param, &call->padding))
        return 0;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_SIGNATURE_PARAM_PSS_SALTLEN)) &&
        !get_salt(signing->provider, param, &call->salt))
        return 0;
    param = OSSL_PARAM_locate_const(params, OSSL_SIGNATURE_PARAM_MGF1_DIGEST);
    return !param || get_digest(signing->provider, param, call->mask_digest);
}

static const OSSL_PARAM *settable_ctx_params(void *context, void *provider) {
    static const OSSL_PARAM params[] = {
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_DIGEST, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_PROPERTIES, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_PAD_MODE, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_PSS_SALTLEN, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_MGF1_DIGEST, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_MGF1_PROPERTIES, NULL, 0),
        OSSL_PARAM_END,
    };
    (void)context, (void)provider;
    return params;
}

static const OSSL_PARAM *gettable_ctx_params(void *context, void *provider) {
    static const OSSL_PARAM params[] = {
        OSSL_PARAM_octet_string(OSSL_SIGNATURE_PARAM_ALGORITHM_ID, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_DIGEST, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_PAD_MODE, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_PSS_SALTLEN, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_SIGNATURE_PARAM_MGF1_DIGEST, NULL, 0),
        OSSL_PARAM_END,
    };
    (void)context, (void)provider;
    return params;
}

static const OSSL_DISPATCH by_digest[] = {
    {OSSL_FUNC_SIGNATURE_NEWCTX, (void (*)(void))signing_new},
    {OSSL_FUNC_SIGNATURE_FREECTX, (void (*)(void))signing_free},
    {OSSL_FUNC_SIGNATURE_DUPCTX, (void (*)(void))signing_dup},
    {OSSL_FUNC_SIGNATURE_SIGN_INIT, (void (*)(void))init},
    {OSSL_FUNC_SIGNATURE_SIGN, (void (*)(void))sign},
    {OSSL_FUNC_SIGNATURE_VERIFY_INIT, (void (*)(void))init},
    {OSSL_FUNC_SIGNATURE_VERIFY, (void (*)(void))verify},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN_INIT, (void (*)(void))digest_init},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN, (void (*)(void))digest_sign},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN_UPDATE, (void (*)(void))digest_update},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN_FINAL, (void (*)(void))digest_sign_final},
    {OSSL_FUNC_SIGNATURE_DIGEST_VERIFY_INIT, (void (*)(void))digest_init},
    {OSSL_FUNC_SIGNATURE_DIGEST_VERIFY_UPDATE, (void (*)(void))digest_update},
    {OSSL_FUNC_SIGNATURE_DIGEST_VERIFY_FINAL, (void (*)(void))digest_verify_final},
    {OSSL_FUNC_SIGNATURE_GET_CTX_PARAMS, (void (*)(void))get_ctx_params},
    {OSSL_FUNC_SIGNATURE_GETTABLE_CTX_PARAMS, (void (*)(void))gettable_ctx_params},
    {OSSL_FUNC_SIGNATURE_SET_CTX_PARAMS, (void (*)(void))set_ctx_params},
    {OSSL_FUNC_SIGNATURE_SETTABLE_CTX_PARAMS, (void (*)(void))settable_ctx_params},
    {0, NULL},
};

static const OSSL_DISPATCH by_message[] = {
    {OSSL_FUNC_SIGNATURE_NEWCTX, (void (*)(void))signing_new},
    {OSSL_FUNC_SIGNATURE_FREECTX, (void (*)(void))signing_free},
    {OSSL_FUNC_SIGNATURE_DUPCTX, (void (*)(void))signing_dup},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN_INIT, (void (*)(void))message_init},
    {OSSL_FUNC_SIGNATURE_DIGEST_SIGN, (void (*)(void))sign},
    {OSSL_FUNC_SIGNATURE_DIGEST_VERIFY_INIT, (void (*)(void))message_init},
    {OSSL_FUNC_SIGNATURE_DIGEST_VERIFY, (void (*)(void))message_verify},
    {OSSL_FUNC_SIGNATURE_GET_CTX_PARAMS, (void (*)(void))get_ctx_params},
    {OSSL_FUNC_SIGNATURE_GETTABLE_CTX_PARAMS, (void (*)(void))gettable_ctx_params},
    {0, NULL},
};

const OSSL_ALGORITHM signatures[] = {
    {ORRERY_RSA, PROPERTIES, by_digest, NULL},
    {ORRERY_ECDSA, PROPERTIES, by_digest, NULL},
    {ORRERY_ED25519, PROPERTIES, by_message, NULL},
    {NULL, NULL, NULL, NULL},
};
