/*
 * What the provider and the vault say to each other, through orrery/vault.h.
 *
 * Both come from one build and run on one machine, so these are plain structures.
 */
#ifndef ORRERY_OPENSSL_WIRE_H
#define ORRERY_OPENSSL_WIRE_H

#include <stdint.h>

#define FINGERPRINT 32 /* SHA-256 of the SubjectPublicKeyInfo */
#define DIGEST_NAME 32

/*
 * orrery_vault_load: this, then the path, then the SubjectPublicKeyInfo that the key must have. The answer is empty, or a
 * text that says why the key cannot be used.
 *
 * Without a path, and with a fingerprint in the place of the SubjectPublicKeyInfo: one who had the key loaded wants it no
 * more. When nobody does, it is dropped, a while later, for there may be connections that were accepted with it.
 */
struct load_request {
    uint32_t path_length;
    uint32_t public_length;
};

enum operation {
    OPERATION_KNOWN = 1, /* whether the key has been loaded */
    OPERATION_SIGN,      /* a digest, or for Ed25519 the message */
    OPERATION_DECRYPT,
};

/*
 * orrery_vault_call: this, then the label (OAEP), then the data. The answer is what comes of it. Errors: ENOKEY where the
 * key has not been loaded, EACCES where the policy forbids it (policy.h), EBADMSG where OpenSSL refuses, EINVAL.
 */
struct call_request {
    uint32_t operation;
    int32_t padding;                             /* RSA_*_PADDING; 0 for the key's own */
    int32_t salt;                                /* as EVP_PKEY_CTX_set_rsa_pss_saltlen takes it */
    uint32_t client_version, negotiated_version; /* RSA_PKCS1_WITH_TLS_PADDING */
    uint32_t label_length;
    char digest[DIGEST_NAME], mask_digest[DIGEST_NAME]; /* names, or empty */
    unsigned char key[FINGERPRINT];
};

#endif
