/*
 * Signatures by AWS-LC (signer/), which makes those that TLS asks for in less time than OpenSSL. What it has not, OpenSSL does.
 */
#ifndef ORRERY_OPENSSL_SIGNER_H
#define ORRERY_OPENSSL_SIGNER_H

#include <stddef.h>

struct signer;

/* A signer of this key, which is in PKCS #8; NULL where there is none for such keys. */
struct signer *orrery_signer_new(const void *pkcs8, size_t length);
void orrery_signer_free(struct signer *signer);

/*
 * Signs a digest of this name, or a message where that is empty; padding and salt are as OpenSSL numbers them. The signature's
 * length, or 0 where OpenSSL has to sign, or to say why that cannot be.
 */
size_t orrery_signer_sign(const struct signer *signer, const char *digest, int padding, int salt,
                          const void *data, size_t length, void *signature, size_t room);

#endif
