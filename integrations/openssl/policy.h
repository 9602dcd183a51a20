/*
 * What a vault does with its keys. By default it makes the signatures that TLS 1.2 and 1.3 need, and nothing else: whoever
 * controls a worker can ask for as much as the policy allows.
 */
#ifndef ORRERY_OPENSSL_POLICY_H
#define ORRERY_OPENSSL_POLICY_H

#include "wire.h"

#include <stdbool.h>
#include <stddef.h>

#include <openssl/evp.h>

/* What is allowed beside signatures of SHA-2 digests with PKCS #1 v1.5, PSS and ECDSA, and Ed25519. */
enum allowed {
    ALLOW_DECRYPT =
        1, /* RSA decryption, which is an oracle for whoever recorded TLS without forward secrecy */
    ALLOW_ANY_DIGEST =
        2,         /* signatures of MD5, SHA-1 and other digests, and of data whose digest is not named */
    ALLOW_RAW = 4, /* RSA without padding, or with that of X9.31 */
};

/* The names of the above, for messages. */
#define POLICY_WORDS "decrypt, any-digest and raw"

/* Reads a list of names, separated by commas or spaces; false where one is unknown. */
bool policy_parse(const char *list, unsigned *allowed);

/* What a call needs to be allowed; 0 for what always is. `data` is what is to be signed or decrypted. */
enum allowed policy_needed(EVP_PKEY *pkey, const struct call_request *call, const void *data, size_t length);

/* The name of what such a call needs where a vault has refused it. */
const char *policy_word(const struct call_request *call);

#endif
