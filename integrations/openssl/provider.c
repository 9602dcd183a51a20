/*
 * OpenSSL's way in: what this provider offers, and its parameters.
 *
 * In openssl.cnf:
 *
 *     [orrery]
 *     module = /usr/lib/orrery/orrery.so
 *     vault = /usr/lib/orrery/orrery-vault     # the default: beside the module
 *     grace = 60                               # seconds for which keys stay that were replaced
 *     signer = openssl                         # make no signature with AWS-LC
 *     allow = decrypt, any-digest, raw         # what the vault does beside the signatures of TLS (policy.h)
 *     activate = 1
 */
#include "provider.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <strings.h>

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/params.h>
#include <openssl/provider.h>

#include <orrery/vault.h>

static const OSSL_ITEM reasons[] = {
    {REASON_REFERENCE, (void *)"not a reference to a key in a vault"},
    {REASON_VAULT, (void *)"the vault does not work"},
    {REASON_KEY, (void *)"the private key cannot be used"},
    {REASON_OPERATION, (void *)"the operation failed"},
    {REASON_PARAMETER, (void *)"a parameter is not supported"},
    {REASON_POLICY, (void *)"the vault's policy does not allow this"},
    {0, NULL},
};

void raise_error(const struct provider *provider, const char *file, int line, const char *function,
                 enum reason reason, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    provider->new_error(provider->core);
    provider->set_error_debug(provider->core, file, line, function);
    provider->set_error(provider->core, reason, format, arguments);
    va_end(arguments);
}

static const OSSL_PARAM *gettable_params(void *provider) {
    static const OSSL_PARAM params[] = {
        OSSL_PARAM_DEFN(OSSL_PROV_PARAM_NAME, OSSL_PARAM_UTF8_PTR, NULL, 0),
        OSSL_PARAM_DEFN(OSSL_PROV_PARAM_STATUS, OSSL_PARAM_INTEGER, NULL, 0),
        OSSL_PARAM_END,
    };
    (void)provider;
    return params;
}

static int get_params(void *provider, OSSL_PARAM params[]) {
    (void)provider;
    OSSL_PARAM *param = OSSL_PARAM_locate(params, OSSL_PROV_PARAM_NAME);
    if (param && !OSSL_PARAM_set_utf8_ptr(param, "Orrery: private keys in a vault"))
        return 0;
    param = OSSL_PARAM_locate(params, OSSL_PROV_PARAM_STATUS);
    return !param || OSSL_PARAM_set_int(param, 1);
}

static const OSSL_ALGORITHM *query(void *provider, int operation, int *no_cache) {
    (void)provider;
    *no_cache = 0;
    switch (operation) {
    case OSSL_OP_KEYMGMT:
        return keymgmts;
    case OSSL_OP_SIGNATURE:
        return signatures;
    case OSSL_OP_ASYM_CIPHER:
        return asym_ciphers;
    case OSSL_OP_DECODER:
        return decoders;
    default:
        return NULL;
    }
}

static const OSSL_ITEM *get_reason_strings(void *provider) {
    (void)provider;
    return reasons;
}

/* What TLS calls them, and what EVP_MD_get0_name does. */
static const char *const digest_names[][2] = {
    {"SHA256", "SHA2-256"},
    {"SHA384", "SHA2-384"},
    {"SHA512", "SHA2-512"},
};

#define DIGESTS (sizeof digest_names / sizeof *digest_names)

EVP_MD *digest_named(const struct provider *provider, const char *name) {
    for (size_t i = 0; i < DIGESTS; i++)
        if (!strcasecmp(name, digest_names[i][0]) || !strcasecmp(name, digest_names[i][1])) {
            EVP_MD *digest = provider->digests[i];
            return digest && EVP_MD_up_ref(digest) ? digest : NULL;
        }
    return EVP_MD_fetch(provider->plain, name, NULL);
}

static void teardown(void *context) {
    struct provider *provider = context;
    orrery_vault_close(provider->vault);
    for (size_t i = 0; i < DIGESTS; i++)
        EVP_MD_free(provider->digests[i]);
    OSSL_PROVIDER_unload(provider->plain_default);
    OSSL_LIB_CTX_free(provider->plain);
    CRYPTO_THREAD_lock_free(provider->lock);
    OPENSSL_free(provider->program);
    OPENSSL_free(provider->grace);
    OPENSSL_free(provider->allow);
    OPENSSL_free(provider->signer);
    OPENSSL_free(provider);
}

/* The program beside this module. */
static char *beside(void) {
    static const char name[] = "orrery-vault";
    Dl_info module;
    if (!dladdr((void *)beside, &module) || !module.dli_fname)
        return NULL;
    const char *slash = strrchr(module.dli_fname, '/');
    size_t folder = slash ? slash + 1 - module.dli_fname : 0;
    char *path = OPENSSL_malloc(folder + sizeof name);
    if (path) {
        memcpy(path, module.dli_fname, folder);
        memcpy(path + folder, name, sizeof name);
    }
    return path;
}

static char *configured(const OSSL_CORE_HANDLE *core, OSSL_FUNC_core_get_params_fn *get, const char *name) {
    char *value = NULL;
    OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_ptr(name, &value, 0), OSSL_PARAM_END};
    return get && get(core, params) && value && *value ? OPENSSL_strdup(value) : NULL;
}

__attribute__((visibility("default"))) int OSSL_provider_init(const OSSL_CORE_HANDLE *core,
                                                              const OSSL_DISPATCH *in,
                                                              const OSSL_DISPATCH **out, void **context) {
    static const OSSL_DISPATCH functions[] = {
        {OSSL_FUNC_PROVIDER_TEARDOWN, (void (*)(void))teardown},
        {OSSL_FUNC_PROVIDER_GETTABLE_PARAMS, (void (*)(void))gettable_params},
        {OSSL_FUNC_PROVIDER_GET_PARAMS, (void (*)(void))get_params},
        {OSSL_FUNC_PROVIDER_QUERY_OPERATION, (void (*)(void))query},
        {OSSL_FUNC_PROVIDER_GET_REASON_STRINGS, (void (*)(void))get_reason_strings},
        {0, NULL},
    };
    struct provider *provider = OPENSSL_zalloc(sizeof *provider);
    OSSL_FUNC_core_get_params_fn *get = NULL;
    if (!provider)
        return 0;
    provider->core = core;
    for (const OSSL_DISPATCH *one = in; one->function_id; one++) {
        switch (one->function_id) {
        case OSSL_FUNC_CORE_GET_PARAMS:
            get = OSSL_FUNC_core_get_params(one);
            break;
        case OSSL_FUNC_CORE_NEW_ERROR:
            provider->new_error = OSSL_FUNC_core_new_error(one);
            break;
        case OSSL_FUNC_CORE_SET_ERROR_DEBUG:
            provider->set_error_debug = OSSL_FUNC_core_set_error_debug(one);
            break;
        case OSSL_FUNC_CORE_VSET_ERROR:
            provider->set_error = OSSL_FUNC_core_vset_error(one);
            break;
        }
    }
    if (!(provider->program = configured(core, get, "vault")))
        provider->program = beside();
    provider->grace = configured(core, get, "grace");
    provider->allow = configured(core, get, "allow");
    provider->signer = configured(core, get, "signer");
    provider->lock = CRYPTO_THREAD_lock_new();
    provider->plain = OSSL_LIB_CTX_new_from_dispatch(core, in);
    provider->plain_default = provider->plain ? OSSL_PROVIDER_load(provider->plain, "default") : NULL;
    for (size_t i = 0; i < DIGESTS && provider->plain_default; i++)
        provider->digests[i] = EVP_MD_fetch(provider->plain, digest_names[i][0], NULL);
    if (!provider->new_error || !provider->set_error_debug || !provider->set_error || !provider->program ||
        !provider->lock || !provider->plain_default) {
        teardown(provider);
        return 0;
    }
    *out = functions;
    *context = provider;
    return 1;
}
