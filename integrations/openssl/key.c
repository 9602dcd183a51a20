/*
 * Keys, and the references that name them.
 *
 * A reference is, in DER, what `orrery vault wrap` writes into a PEM:
 *
 *     SEQUENCE {
 *         INTEGER 1,
 *         UTF8String path,                -- of the private key's file, absolute
 *         SubjectPublicKeyInfo
 *     }
 */
#include "der.h"
#include "provider.h"

#include <string.h>

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/sha.h>
#include <openssl/x509.h>

void key_note_kind(struct key *key) {
    if (!key->public)
        return;
    key->pss = EVP_PKEY_is_a(key->public, "RSA-PSS");
    key->rsa = key->pss || EVP_PKEY_is_a(key->public, "RSA");
}

/* The path, the public key with its encoding; false where it is no reference. */
static bool parse(struct key *key, const unsigned char *data, size_t length) {
    const unsigned char *at = data, *end = data + length, *content;
    long size;
    if (!(content = der_element(&at, end, V_ASN1_SEQUENCE, &size)) || at != end)
        return false;
    at = content;
    if (!(content = der_element(&at, end, V_ASN1_INTEGER, &size)) || size != 1 || *content != 1)
        return false;
    if (!(content = der_element(&at, end, V_ASN1_UTF8STRING, &size)) || size < 2 || *content != '/' ||
        memchr(content, 0, size))
        return false;
    key->path = OPENSSL_strndup((const char *)content, size);
    key->encoded_length = end - at;
    key->encoded = OPENSSL_memdup(at, key->encoded_length);
    key->public = d2i_PUBKEY_ex(NULL, &at, end - at, key->provider->plain, NULL);
    key_note_kind(key);
    return key->path && key->encoded && key->public && at == end;
}

struct key *key_of_reference(struct provider *provider, const unsigned char *data, size_t length) {
    struct key *key = OPENSSL_zalloc(sizeof *key);
    if (!key)
        return NULL;
    key->provider = provider;
    atomic_init(&key->references, 1);
    ERR_set_mark();
    bool good = parse(key, data, length);
    ERR_pop_to_mark();
    if (!good) {
        RAISE(provider, REASON_REFERENCE, "make it again: orrery vault wrap KEY");
        key_free(key);
        return NULL;
    }
    SHA256(key->encoded, key->encoded_length, key->fingerprint);
    return key;
}

void key_up(struct key *key) { atomic_fetch_add(&key->references, 1); }

void key_free(struct key *key) {
    if (!key || atomic_fetch_sub(&key->references, 1) != 1)
        return;
    if (key->vault)
        vault_give_up(key);
    EVP_PKEY_free(key->public);
    OPENSSL_free(key->encoded);
    OPENSSL_free(key->path);
    OPENSSL_free(key);
}
