/*
 * Parameters of RSA operations, which OpenSSL gives as numbers or as words.
 */
#ifndef ORRERY_OPENSSL_PARAMETERS_H
#define ORRERY_OPENSSL_PARAMETERS_H

#include "provider.h"

/* The padding; false with an error raised. */
bool get_padding(const struct provider *provider, const OSSL_PARAM *param, int *padding);
bool put_padding(OSSL_PARAM *param, int padding);
/* The length of the salt. */
bool get_salt(const struct provider *provider, const OSSL_PARAM *param, int *salt);
/* The name of a digest. */
bool get_digest(const struct provider *provider, const OSSL_PARAM *param, char name[DIGEST_NAME]);

#endif
