/*
 * Keys of the ENGINE: where the private part is, and how the vault is asked to work with it.
 */
#ifndef ORRERY_OPENSSL_ENGINE_KEY_H
#define ORRERY_OPENSSL_ENGINE_KEY_H

#include "../wire.h"

#include <sys/types.h>

#include <openssl/evp.h>

struct vault_key;

/* Reads the reference in a file and has the vault load the key; its public part goes to `*public`. */
struct vault_key *vault_key_read(const char *path, EVP_PKEY **public);
void vault_key_free(struct vault_key *key);

/* Asks for an operation; the result's length, or -1 with an error raised. `call` needs no key named. */
ssize_t vault_key_call(const struct vault_key *key, struct call_request *call, const void *data,
                       size_t length, void *answer, size_t room);

/* Names the vault's program; the default is the one in the directory above this module. */
int vault_program(const char *path);
/* Sets the policy of vaults that are started from now on (policy.h); 0 with an error raised where it is none. */
int vault_policy(const char *list);

/* Puts a text into OpenSSL's error queue. */
void vault_key_complain(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
