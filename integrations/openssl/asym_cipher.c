/*
 * RSA encryption: ciphertexts are decrypted in the vault (TLS_RSA key exchange, S/MIME ...), plaintexts encrypted by the
 * default provider.
 */
#include "parameters.h"

#include <string.h>

#include <openssl/core_names.h>
#include <openssl/params.h>
#include <openssl/rsa.h>
#include <openssl/ssl.h>

struct cipher {
    struct provider *provider;
    struct key *key;
    struct call_request call;
    unsigned char *label;
};

static void *cipher_new(void *provider) {
    struct cipher *cipher = OPENSSL_zalloc(sizeof *cipher);
    if (cipher)
        cipher->provider = provider;
    return cipher;
}

static void cipher_free(void *context) {
    struct cipher *cipher = context;
    key_free(cipher->key);
    OPENSSL_free(cipher->label);
    OPENSSL_free(cipher);
}

static void *cipher_dup(void *context) {
    struct cipher *from = context, *to = OPENSSL_memdup(from, sizeof *from);
    if (!to)
        return NULL;
    if (to->key)
        key_up(to->key);
    if (from->label && !(to->label = OPENSSL_memdup(from->label, from->call.label_length))) {
        cipher_free(to);
        return NULL;
    }
    return to;
}

static int set_ctx_params(void *context, const OSSL_PARAM params[]) {
    struct cipher *cipher = context;
    struct call_request *call = &cipher->call;
    const OSSL_PARAM *param;
    if (!params)
        return 1;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_PAD_MODE)) &&
        !get_padding(cipher->provider, param, &call->padding))
        return 0;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_OAEP_DIGEST)) &&
        !get_digest(cipher->provider, param, call->digest))
        return 0;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_MGF1_DIGEST)) &&
        !get_digest(cipher->provider, param, call->mask_digest))
        return 0;
    if ((param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_OAEP_LABEL))) {
        void *label = NULL;
        size_t length;
        if (!OSSL_PARAM_get_octet_string(param, &label, 0, &length) || length > 4096)
            return 0;
        OPENSSL_free(cipher->label);
        cipher->label = label;
        call->label_length = length;
    }
    if ((param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_TLS_CLIENT_VERSION)) &&
        !OSSL_PARAM_get_uint(param, &call->client_version))
        return 0;
    param = OSSL_PARAM_locate_const(params, OSSL_ASYM_CIPHER_PARAM_TLS_NEGOTIATED_VERSION);
    return !param || OSSL_PARAM_get_uint(param, &call->negotiated_version);
}

static int get_ctx_params(void *context, OSSL_PARAM params[]) {
    struct cipher *cipher = context;
    OSSL_PARAM *param = OSSL_PARAM_locate(params, OSSL_ASYM_CIPHER_PARAM_PAD_MODE);
    return !param || put_padding(param, cipher->call.padding);
}

static int init(void *context, void *key, const OSSL_PARAM params[]) {
    struct cipher *cipher = context;
    key_up(key);
    key_free(cipher->key);
    cipher->key = key;
    cipher->call.padding = RSA_PKCS1_PADDING;
    return set_ctx_params(context, params);
}

static int decrypt(void *context, unsigned char *out, size_t *length, size_t room, const unsigned char *in,
                   size_t in_length) {
    struct cipher *cipher = context;
    if (!out) {
        *length = cipher->call.padding == RSA_PKCS1_WITH_TLS_PADDING ? SSL_MAX_MASTER_KEY_LENGTH
                                                                     : EVP_PKEY_get_size(cipher->key->public);
        return 1;
    }
    cipher->call.operation = OPERATION_DECRYPT;
    ssize_t done = vault_call(cipher->key, &cipher->call, cipher->label, in, in_length, out, room);
    if (done < 0)
        return 0;
    *length = done;
    return 1;
}

static int encrypt(void *context, unsigned char *out, size_t *length, size_t room, const unsigned char *in,
                   size_t in_length) {
    struct cipher *cipher = context;
    const struct call_request *call = &cipher->call;
    EVP_PKEY_CTX *with = EVP_PKEY_CTX_new_from_pkey(cipher->provider->plain, cipher->key->public, NULL);
    int padding = call->padding;
    OSSL_PARAM params[5], *param = params;
    *param++ = OSSL_PARAM_construct_int(OSSL_ASYM_CIPHER_PARAM_PAD_MODE, &padding);
    if (*call->digest)
        *param++ =
            OSSL_PARAM_construct_utf8_string(OSSL_ASYM_CIPHER_PARAM_OAEP_DIGEST, (char *)call->digest, 0);
    if (*call->mask_digest)
        *param++ = OSSL_PARAM_construct_utf8_string(OSSL_ASYM_CIPHER_PARAM_MGF1_DIGEST,
                                                    (char *)call->mask_digest, 0);
    if (cipher->label)
        *param++ = OSSL_PARAM_construct_octet_string(OSSL_ASYM_CIPHER_PARAM_OAEP_LABEL, cipher->label,
                                                     call->label_length);
    *param = OSSL_PARAM_construct_end();
    *length = room;
    int done = with && EVP_PKEY_encrypt_init(with) > 0 && EVP_PKEY_CTX_set_params(with, params) > 0 &&
               EVP_PKEY_encrypt(with, out, length, in, in_length) > 0;
    EVP_PKEY_CTX_free(with);
    return done;
}

static const OSSL_PARAM *settable_ctx_params(void *context, void *provider) {
    static const OSSL_PARAM params[] = {
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_PAD_MODE, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_OAEP_DIGEST, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_OAEP_DIGEST_PROPS, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_MGF1_DIGEST, NULL, 0),
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_MGF1_DIGEST_PROPS, NULL, 0),
        OSSL_PARAM_octet_string(OSSL_ASYM_CIPHER_PARAM_OAEP_LABEL, NULL, 0),
        OSSL_PARAM_uint(OSSL_ASYM_CIPHER_PARAM_TLS_CLIENT_VERSION, NULL),
        OSSL_PARAM_uint(OSSL_ASYM_CIPHER_PARAM_TLS_NEGOTIATED_VERSION, NULL),
        OSSL_PARAM_END,
    };
    (void)context, (void)provider;
    return params;
}

static const OSSL_PARAM *gettable_ctx_params(void *context, void *provider) {
    static const OSSL_PARAM params[] = {
        OSSL_PARAM_utf8_string(OSSL_ASYM_CIPHER_PARAM_PAD_MODE, NULL, 0),
        OSSL_PARAM_END,
    };
    (void)context, (void)provider;
    return params;
}

static const OSSL_DISPATCH rsa[] = {
    {OSSL_FUNC_ASYM_CIPHER_NEWCTX, (void (*)(void))cipher_new},
    {OSSL_FUNC_ASYM_CIPHER_FREECTX, (void (*)(void))cipher_free},
    {OSSL_FUNC_ASYM_CIPHER_DUPCTX, (void (*)(void))cipher_dup},
    {OSSL_FUNC_ASYM_CIPHER_DECRYPT_INIT, (void (*)(void))init},
    {OSSL_FUNC_ASYM_CIPHER_DECRYPT, (void (*)(void))decrypt},
    {OSSL_FUNC_ASYM_CIPHER_ENCRYPT_INIT, (void (*)(void))init},
    {OSSL_FUNC_ASYM_CIPHER_ENCRYPT, (void (*)(void))encrypt},
    {OSSL_FUNC_ASYM_CIPHER_GET_CTX_PARAMS, (void (*)(void))get_ctx_params},
    {OSSL_FUNC_ASYM_CIPHER_GETTABLE_CTX_PARAMS, (void (*)(void))gettable_ctx_params},
    {OSSL_FUNC_ASYM_CIPHER_SET_CTX_PARAMS, (void (*)(void))set_ctx_params},
    {OSSL_FUNC_ASYM_CIPHER_SETTABLE_CTX_PARAMS, (void (*)(void))settable_ctx_params},
    {0, NULL},
};

const OSSL_ALGORITHM asym_ciphers[] = {
    {"RSA:rsaEncryption:1.2.840.113549.1.1.1", PROPERTIES, rsa, NULL},
    {NULL, NULL, NULL, NULL},
};
