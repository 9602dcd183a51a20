/*
 * The provider's own parts, as its files see each other.
 */
#ifndef ORRERY_OPENSSL_PROVIDER_H
#define ORRERY_OPENSSL_PROVIDER_H

#include "wire.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

#include <openssl/core.h>
#include <openssl/core_dispatch.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>

#define REFERENCE_NAME "ORRERY VAULT KEY" /* between the dashes of its PEM */
#define REFERENCE_STRUCTURE "orrery-vault-key"
#define PROPERTIES "provider=orrery"

/*
 * Operations with keys in a vault have names of their own, which only such keys ask for: OpenSSL then neither takes ours for
 * other keys, nor tries for each signature to move the key to another provider.
 */
#define ORRERY_RSA "ORRERY-RSA"
#define ORRERY_ECDSA "ORRERY-ECDSA"
#define ORRERY_ED25519 "ORRERY-ED25519"

struct orrery_vault;

struct provider {
    const OSSL_CORE_HANDLE *core;
    OSSL_FUNC_core_new_error_fn *new_error;
    OSSL_FUNC_core_set_error_debug_fn *set_error_debug;
    OSSL_FUNC_core_vset_error_fn *set_error;
    /* OpenSSL with nothing but its default provider: does all that needs no private key. */
    OSSL_LIB_CTX *plain;
    OSSL_PROVIDER *plain_default;
    EVP_MD *digests[3]; /* those that TLS signs with: to look one up takes 0.3 us */
    char *program;      /* what to start as the vault */
    char *grace;  /* for how many seconds it keeps keys that nobody wants any more; NULL for its own choice */
    char *allow;  /* what the vault does beside TLS's signatures (policy.h); NULL for nothing */
    char *signer; /* "openssl" where that makes all signatures; NULL for the vault's own choice */
    CRYPTO_RWLOCK *lock;
    struct orrery_vault *vault; /* under the lock */
    /*
     * The process that had a key loaded last. It alone gives keys up: what workers free, which were forked from it, others
     * still use; and a server that became a daemon is the one that loads them again.
     */
    atomic_int owner;
};

/* A digest of `plain` by any of its names, to be freed; NULL where there is none. */
EVP_MD *digest_named(const struct provider *provider, const char *name);

/* Why something failed, for the error queue. */
enum reason {
    REASON_REFERENCE = 1,
    REASON_VAULT,
    REASON_KEY,
    REASON_OPERATION,
    REASON_PARAMETER,
    REASON_POLICY,
};

void raise_error(const struct provider *provider, const char *file, int line, const char *function,
                 enum reason reason, const char *format, ...) __attribute__((format(printf, 6, 7)));
#define RAISE(provider, reason, ...)                                                                         \
    raise_error(provider, OPENSSL_FILE, OPENSSL_LINE, OPENSSL_FUNC, reason, __VA_ARGS__)

/* A key: its public part, and where the private one is. */
struct key {
    struct provider *provider;
    EVP_PKEY *public;       /* of provider->plain */
    bool rsa, pss;          /* its kind: an RSA key, and one for PSS only; asked for with each signature */
    char *path;             /* of the private key's file; NULL where there is only a public key */
    unsigned char *encoded; /* SubjectPublicKeyInfo */
    size_t encoded_length;
    unsigned char fingerprint[FINGERPRINT];
    const struct orrery_vault *vault; /* that has loaded it for this key; NULL for none */
    atomic_uint references;
};

/* Reads the content of a reference; NULL with an error raised. */
struct key *key_of_reference(struct provider *provider, const unsigned char *data, size_t length);
/* Notes the kind of a key that has got its public part. */
void key_note_kind(struct key *key);
void key_up(struct key *key);
void key_free(struct key *key);

/* Has the vault load the private key, starting the vault if there is none. */
bool vault_load(struct key *key);
/* Tells the vault that this key is not wanted any more. */
void vault_give_up(const struct key *key);
/* Asks for an operation; the result's length, or -1 with an error raised. `call` needs no key named. */
ssize_t vault_call(const struct key *key, struct call_request *call, const void *label, const void *data,
                   size_t length, void *answer, size_t room);

extern const OSSL_ALGORITHM keymgmts[], signatures[], asym_ciphers[], decoders[];

#endif
