/*
 * Key management: keys of which the public part is here and the private one is not.
 *
 * The public part is an ordinary key of OpenSSL's default provider, which answers everything that can be asked of it. A
 * private part can be neither imported nor exported, so OpenSSL never takes an operation with it to another provider.
 */
#include "provider.h"

#include <string.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/params.h>
#include <openssl/sha.h>
#include <openssl/x509.h>

static void *keymgmt_new(void *provider) {
    struct key *key = OPENSSL_zalloc(sizeof *key);
    if (key) {
        key->provider = provider;
        atomic_init(&key->references, 1);
    }
    return key;
}

static void keymgmt_free(void *key) { key_free(key); }

static void *keymgmt_load(const void *reference, size_t size) {
    struct key *key = NULL;
    if (size == sizeof key) {
        key = *(struct key *const *)reference;
        *(struct key **)reference = NULL;
    }
    return key;
}

static int has(const void *data, int selection) {
    const struct key *key = data;
    return key->public && (!(selection & OSSL_KEYMGMT_SELECT_PRIVATE_KEY) || key->path);
}

static int match(const void *one, const void *other, int selection) {
    (void)selection;
    const struct key *a = one, *b = other;
    return a->public && b->public && EVP_PKEY_eq(a->public, b->public) == 1;
}

static int validate(const void *data, int selection, int depth) {
    (void)depth;
    return has(data, selection);
}

static void *duplicate(const void *data, int selection) {
    struct key *key = (struct key *)data;
    if (selection & OSSL_KEYMGMT_SELECT_PRIVATE_KEY || !key->path) {
        /* Keys never change, but while they are imported. */
        key_up(key);
        return key;
    }
    struct key *copy = keymgmt_new(key->provider);
    if (copy && EVP_PKEY_up_ref(key->public))
        copy->public = key->public;
    if (copy)
        key_note_kind(copy);
    return copy;
}

static int get_params(void *data, OSSL_PARAM params[]) {
    struct key *key = data;
    return key->public && EVP_PKEY_get_params(key->public, params);
}

static int do_import(struct key *key, const char *type, int selection, const OSSL_PARAM params[]) {
    if (key->public || selection & OSSL_KEYMGMT_SELECT_PRIVATE_KEY)
        return 0;
    EVP_PKEY_CTX *context = EVP_PKEY_CTX_new_from_name(key->provider->plain, type, NULL);
    int done = context && EVP_PKEY_fromdata_init(context) > 0 &&
               EVP_PKEY_fromdata(context, &key->public, selection, (OSSL_PARAM *)params) > 0;
    EVP_PKEY_CTX_free(context);
    key_note_kind(key);
    return done;
}

static int do_export(void *data, int selection, OSSL_CALLBACK *callback, void *argument) {
    const struct key *key = data;
    OSSL_PARAM *params = NULL;
    if (!key->public || (key->path && selection & OSSL_KEYMGMT_SELECT_PRIVATE_KEY))
        return 0;
    if (!EVP_PKEY_todata(key->public, selection & ~OSSL_KEYMGMT_SELECT_PRIVATE_KEY, &params))
        return 0;
    int done = callback(params, argument);
    OSSL_PARAM_free(params);
    return done;
}

/* What may be imported, exported or asked for, by the names that the default provider has for it. */
static const OSSL_PARAM rsa_parts[] = {
    OSSL_PARAM_BN(OSSL_PKEY_PARAM_RSA_N, NULL, 0),
    OSSL_PARAM_BN(OSSL_PKEY_PARAM_RSA_E, NULL, 0),
    OSSL_PARAM_END,
};
static const OSSL_PARAM ec_parts[] = {
    OSSL_PARAM_utf8_string(OSSL_PKEY_PARAM_GROUP_NAME, NULL, 0),
    OSSL_PARAM_octet_string(OSSL_PKEY_PARAM_PUB_KEY, NULL, 0),
    OSSL_PARAM_END,
};
static const OSSL_PARAM ed25519_parts[] = {
    OSSL_PARAM_octet_string(OSSL_PKEY_PARAM_PUB_KEY, NULL, 0),
    OSSL_PARAM_END,
};
static const OSSL_PARAM gettable[] = {
    OSSL_PARAM_int(OSSL_PKEY_PARAM_BITS, NULL),
    OSSL_PARAM_int(OSSL_PKEY_PARAM_SECURITY_BITS, NULL),
    OSSL_PARAM_int(OSSL_PKEY_PARAM_MAX_SIZE, NULL),
    OSSL_PARAM_utf8_string(OSSL_PKEY_PARAM_DEFAULT_DIGEST, NULL, 0),
    OSSL_PARAM_utf8_string(OSSL_PKEY_PARAM_MANDATORY_DIGEST, NULL, 0),
    OSSL_PARAM_utf8_string(OSSL_PKEY_PARAM_GROUP_NAME, NULL, 0),
    OSSL_PARAM_octet_string(OSSL_PKEY_PARAM_ENCODED_PUBLIC_KEY, NULL, 0),
    OSSL_PARAM_octet_string(OSSL_PKEY_PARAM_PUB_KEY, NULL, 0),
    OSSL_PARAM_BN(OSSL_PKEY_PARAM_RSA_N, NULL, 0),
    OSSL_PARAM_BN(OSSL_PKEY_PARAM_RSA_E, NULL, 0),
    OSSL_PARAM_END,
};

static const OSSL_PARAM *gettable_params(void *provider) {
    (void)provider;
    return gettable;
}

#define KEYMGMT(symbol, type, parts, operation)                                                              \
    static int import_##symbol(void *key, int selection, const OSSL_PARAM params[]) {                        \
        return do_import(key, type, selection, params);                                                      \
    }                                                                                                        \
    static const OSSL_PARAM *types_##symbol(int selection) {                                                 \
        return selection & OSSL_KEYMGMT_SELECT_PUBLIC_KEY ? parts : NULL;                                    \
    }                                                                                                        \
    static const char *operation_##symbol(int id) {                                                          \
        return id == OSSL_OP_SIGNATURE ? operation : id == OSSL_OP_ASYM_CIPHER ? ORRERY_RSA : NULL;          \
    }                                                                                                        \
    static const OSSL_DISPATCH symbol[] = {                                                                  \
        {OSSL_FUNC_KEYMGMT_NEW, (void (*)(void))keymgmt_new},                                                \
        {OSSL_FUNC_KEYMGMT_FREE, (void (*)(void))keymgmt_free},                                              \
        {OSSL_FUNC_KEYMGMT_LOAD, (void (*)(void))keymgmt_load},                                              \
        {OSSL_FUNC_KEYMGMT_HAS, (void (*)(void))has},                                                        \
        {OSSL_FUNC_KEYMGMT_MATCH, (void (*)(void))match},                                                    \
        {OSSL_FUNC_KEYMGMT_VALIDATE, (void (*)(void))validate},                                              \
        {OSSL_FUNC_KEYMGMT_DUP, (void (*)(void))duplicate},                                                  \
        {OSSL_FUNC_KEYMGMT_GET_PARAMS, (void (*)(void))get_params},                                          \
        {OSSL_FUNC_KEYMGMT_GETTABLE_PARAMS, (void (*)(void))gettable_params},                                \
        {OSSL_FUNC_KEYMGMT_IMPORT, (void (*)(void))import_##symbol},                                         \
        {OSSL_FUNC_KEYMGMT_IMPORT_TYPES, (void (*)(void))types_##symbol},                                    \
        {OSSL_FUNC_KEYMGMT_EXPORT, (void (*)(void))do_export},                                               \
        {OSSL_FUNC_KEYMGMT_EXPORT_TYPES, (void (*)(void))types_##symbol},                                    \
        {OSSL_FUNC_KEYMGMT_QUERY_OPERATION_NAME, (void (*)(void))operation_##symbol},                        \
        {0, NULL},                                                                                           \
    };

KEYMGMT(rsa, "RSA", rsa_parts, ORRERY_RSA)
KEYMGMT(rsa_pss, "RSA-PSS", rsa_parts, ORRERY_RSA)
KEYMGMT(ec, "EC", ec_parts, ORRERY_ECDSA)
KEYMGMT(ed25519, "ED25519", ed25519_parts, ORRERY_ED25519)

const OSSL_ALGORITHM keymgmts[] = {
    {"RSA:rsaEncryption:1.2.840.113549.1.1.1", PROPERTIES, rsa, NULL},
    {"RSA-PSS:RSASSA-PSS:1.2.840.113549.1.1.10", PROPERTIES, rsa_pss, NULL},
    {"EC:id-ecPublicKey:1.2.840.10045.2.1", PROPERTIES, ec, NULL},
    {"ED25519:1.3.101.112", PROPERTIES, ed25519, NULL},
    {NULL, NULL, NULL, NULL},
};
