/*
 * Decoders: how the reference in a PEM file becomes a key.
 *
 * There are two steps, as everywhere in OpenSSL: one takes the PEM's wrapping off, and tells which type of key its content
 * is; the other makes the key. Programs that read a private key from a PEM file, whichever way, come by here.
 */
#include "provider.h"

#include <string.h>

#include <openssl/bio.h>
#include <openssl/core_names.h>
#include <openssl/core_object.h>
#include <openssl/err.h>
#include <openssl/params.h>
#include <openssl/pem.h>

static void *decoder_new(void *provider) { return provider; }

static void decoder_free(void *provider) { (void)provider; }

static int does_selection(void *provider, int selection) {
    (void)provider;
    return selection == 0 ||
           (selection & (OSSL_KEYMGMT_SELECT_PRIVATE_KEY | OSSL_KEYMGMT_SELECT_PUBLIC_KEY)) != 0;
}

/* Hands on what comes of decoding. */
static int deliver(const char *type, const char *structure, const char *what, void *data, size_t length,
                   OSSL_CALLBACK *callback, void *argument) {
    int kind = OSSL_OBJECT_PKEY;
    OSSL_PARAM params[5], *param = params;
    *param++ = OSSL_PARAM_construct_int(OSSL_OBJECT_PARAM_TYPE, &kind);
    *param++ = OSSL_PARAM_construct_utf8_string(OSSL_OBJECT_PARAM_DATA_TYPE, (char *)type, 0);
    if (structure)
        *param++ = OSSL_PARAM_construct_utf8_string(OSSL_OBJECT_PARAM_DATA_STRUCTURE, (char *)structure, 0);
    *param++ = OSSL_PARAM_construct_octet_string(what, data, length);
    *param = OSSL_PARAM_construct_end();
    return callback(params, argument);
}

static int decode_pem(void *context, OSSL_CORE_BIO *input, int selection, OSSL_CALLBACK *callback,
                      void *argument, OSSL_PASSPHRASE_CALLBACK *passphrase, void *passphrase_argument) {
    static const char *const types[] = {"RSA", "RSA-PSS", "EC", "ED25519"};
    struct provider *provider = context;
    char *name = NULL, *header = NULL;
    unsigned char *data = NULL;
    long length = 0;
    int done = 1; /* not ours: others may try */
    (void)selection, (void)passphrase, (void)passphrase_argument;
    BIO *bio = BIO_new_from_core_bio(provider->plain, input);
    if (!bio)
        return 0;
    ERR_set_mark();
    int read = PEM_read_bio(bio, &name, &header, &data, &length);
    ERR_pop_to_mark();
    if (read > 0 && !strcmp(name, REFERENCE_NAME)) {
        struct key *key = key_of_reference(provider, data, length);
        const char *type = NULL;
        for (size_t i = 0; key && i < sizeof types / sizeof *types; i++)
            if (EVP_PKEY_is_a(key->public, types[i]))
                type = types[i];
        if (key && !type)
            RAISE(provider, REASON_REFERENCE, "keys of type %s are not supported",
                  EVP_PKEY_get0_type_name(key->public));
        done = type &&
               deliver(type, REFERENCE_STRUCTURE, OSSL_OBJECT_PARAM_DATA, data, length, callback, argument);
        key_free(key);
    }
    OPENSSL_free(name);
    OPENSSL_free(header);
    OPENSSL_free(data);
    BIO_free(bio);
    return done;
}

static int decode_reference(struct provider *provider, const char *type, OSSL_CORE_BIO *input,
                            OSSL_CALLBACK *callback, void *argument) {
    BIO *bio = BIO_new_from_core_bio(provider->plain, input);
    unsigned char data[16384];
    size_t length = 0, got;
    while (bio && length < sizeof data && BIO_read_ex(bio, data + length, sizeof data - length, &got) && got)
        length += got;
    BIO_free(bio);
    struct key *key = key_of_reference(provider, data, length);
    int done = 0;
    if (key && !EVP_PKEY_is_a(key->public, type))
        done = 1;
    else if (key && vault_load(key)) {
        done = deliver(type, NULL, OSSL_OBJECT_PARAM_REFERENCE, &key, sizeof key, callback, argument);
        /* Whoever takes the key leaves nothing there. */
    }
    key_free(key);
    return done;
}

#define DECODE(symbol, type)                                                                                 \
    static int decode_##symbol(void *provider, OSSL_CORE_BIO *input, int selection, OSSL_CALLBACK *callback, \
                               void *argument, OSSL_PASSPHRASE_CALLBACK *passphrase,                         \
                               void *passphrase_argument) {                                                  \
        (void)selection, (void)passphrase, (void)passphrase_argument;                                        \
        return decode_reference(provider, type, input, callback, argument);                                  \
    }                                                                                                        \
    DECODER(symbol, decode_##symbol)
#define DECODER(symbol, function)                                                                            \
    static const OSSL_DISPATCH symbol[] = {                                                                  \
        {OSSL_FUNC_DECODER_NEWCTX, (void (*)(void))decoder_new},                                             \
        {OSSL_FUNC_DECODER_FREECTX, (void (*)(void))decoder_free},                                           \
        {OSSL_FUNC_DECODER_DOES_SELECTION, (void (*)(void))does_selection},                                  \
        {OSSL_FUNC_DECODER_DECODE, (void (*)(void))function},                                                \
        {0, NULL},                                                                                           \
    };

DECODER(pem, decode_pem)
DECODE(rsa, "RSA")
DECODE(rsa_pss, "RSA-PSS")
DECODE(ec, "EC")
DECODE(ed25519, "ED25519")

#define OURS PROPERTIES ",input=der,structure=" REFERENCE_STRUCTURE
const OSSL_ALGORITHM decoders[] = {
    {"DER", PROPERTIES ",input=pem", pem, NULL},
    {"RSA:rsaEncryption:1.2.840.113549.1.1.1", OURS, rsa, NULL},
    {"RSA-PSS:RSASSA-PSS:1.2.840.113549.1.1.10", OURS, rsa_pss, NULL},
    {"EC:id-ecPublicKey:1.2.840.10045.2.1", OURS, ec, NULL},
    {"ED25519:1.3.101.112", OURS, ed25519, NULL},
    {NULL, NULL, NULL, NULL},
};
