#include "parameters.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/core_names.h>
#include <openssl/params.h>
#include <openssl/rsa.h>

static const struct {
    const char *word;
    int number;
} paddings[] = {
    {OSSL_PKEY_RSA_PAD_MODE_NONE, RSA_NO_PADDING},
    {OSSL_PKEY_RSA_PAD_MODE_PKCSV15, RSA_PKCS1_PADDING},
    {OSSL_PKEY_RSA_PAD_MODE_OAEP, RSA_PKCS1_OAEP_PADDING},
    {"oeap", RSA_PKCS1_OAEP_PADDING},
    {OSSL_PKEY_RSA_PAD_MODE_X931, RSA_X931_PADDING},
    {OSSL_PKEY_RSA_PAD_MODE_PSS, RSA_PKCS1_PSS_PADDING},
};

bool get_padding(const struct provider *provider, const OSSL_PARAM *param, int *padding) {
    if (param->data_type != OSSL_PARAM_UTF8_STRING)
        return OSSL_PARAM_get_int(param, padding);
    for (size_t i = 0; i < sizeof paddings / sizeof *paddings; i++)
        if (!strcmp(param->data, paddings[i].word)) {
            *padding = paddings[i].number;
            return true;
        }
    RAISE(provider, REASON_PARAMETER, "padding %s", (const char *)param->data);
    return false;
}

bool put_padding(OSSL_PARAM *param, int padding) {
    if (param->data_type != OSSL_PARAM_UTF8_STRING)
        return OSSL_PARAM_set_int(param, padding);
    for (size_t i = 0; i < sizeof paddings / sizeof *paddings; i++)
        if (paddings[i].number == padding)
            return OSSL_PARAM_set_utf8_string(param, paddings[i].word);
    return false;
}

bool get_salt(const struct provider *provider, const OSSL_PARAM *param, int *salt) {
    if (param->data_type != OSSL_PARAM_UTF8_STRING)
        return OSSL_PARAM_get_int(param, salt);
    const char *word = param->data;
    char *end;
    if (!strcmp(word, OSSL_PKEY_RSA_PSS_SALT_LEN_DIGEST))
        *salt = RSA_PSS_SALTLEN_DIGEST;
    else if (!strcmp(word, OSSL_PKEY_RSA_PSS_SALT_LEN_MAX))
        *salt = RSA_PSS_SALTLEN_MAX;
    else if (!strcmp(word, OSSL_PKEY_RSA_PSS_SALT_LEN_AUTO))
        *salt = RSA_PSS_SALTLEN_AUTO;
    else if (*salt = strtol(word, &end, 10), end == word || *end || *salt < 0) {
        RAISE(provider, REASON_PARAMETER, "salt length %s", word);
        return false;
    }
    return true;
}

bool get_digest(const struct provider *provider, const OSSL_PARAM *param, char name[DIGEST_NAME]) {
    const char *word = param->data;
    if (param->data_type != OSSL_PARAM_UTF8_STRING || !word || strlen(word) >= DIGEST_NAME) {
        RAISE(provider, REASON_PARAMETER, "digest");
        return false;
    }
    memset(name, 0, DIGEST_NAME);
    strcpy(name, word);
    return true;
}
