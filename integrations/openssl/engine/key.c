#include "key.h"

#include "../der.h"
#include "../policy.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <openssl/asn1.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/sha.h>
#include <openssl/x509.h>

#include <orrery/vault.h>

#define REFERENCE_NAME "ORRERY VAULT KEY"

struct vault_key {
    char *path;             /* of the private key's file */
    unsigned char *encoded; /* SubjectPublicKeyInfo */
    size_t encoded_length;
    unsigned char fingerprint[FINGERPRINT];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct orrery_vault *vault; /* under the lock */
static char *program;              /* as above */
static char policy[256];           /* "allow=LIST", or empty; as above */

void vault_key_complain(const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    static int library;
    if (!library)
        library = ERR_get_next_error_library();
    ERR_put_error(library, 0, 1, __FILE__, __LINE__);
    ERR_add_error_data(2, "orrery: ", text);
}

int vault_program(const char *path) {
    char *copy = strdup(path);
    pthread_mutex_lock(&lock);
    if (copy) {
        free(program);
        program = copy;
    }
    pthread_mutex_unlock(&lock);
    return copy != NULL;
}

int vault_policy(const char *list) {
    unsigned allowed;
    pthread_mutex_lock(&lock);
    int good = policy_parse(list, &allowed) && strlen(list) < sizeof policy - 6;
    if (good)
        snprintf(policy, sizeof policy, "allow=%s", list);
    pthread_mutex_unlock(&lock);
    if (!good)
        vault_key_complain("ALLOW is a list of " POLICY_WORDS ", not %s", list);
    return good;
}

/* The program in the directory above that of this module; under the lock. */
static const char *find_program(void) {
    Dl_info module;
    if (program || !dladdr((void *)find_program, &module) || !module.dli_fname)
        return program;
    static const char name[] = "../orrery-vault";
    const char *slash = strrchr(module.dli_fname, '/');
    size_t folder = slash ? slash + 1 - module.dli_fname : 0;
    program = malloc(folder + sizeof name);
    if (program) {
        memcpy(program, module.dli_fname, folder);
        memcpy(program + folder, name, sizeof name);
    }
    return program;
}

/* The vault; started if there is none, or if the one there is is `broken`. */
static struct orrery_vault *vault_other_than(const struct orrery_vault *broken) {
    pthread_mutex_lock(&lock);
    struct orrery_vault *now = vault;
    if (now == broken) {
        const char *path = find_program(), *arguments[] = {"orrery-vault", *policy ? policy : NULL, NULL};
        now = path ? orrery_vault_spawn(path, arguments) : NULL;
        /* A broken one is left alone: other threads may be about to notice. */
        if (now)
            vault = now;
        else
            vault_key_complain("%s", path ? orrery_last_error() : "no program for the vault");
    }
    pthread_mutex_unlock(&lock);
    return now;
}

/* Has the vault load the key. */
static int load(const struct orrery_vault *into, const struct vault_key *key) {
    struct load_request header = {strlen(key->path), key->encoded_length};
    size_t length = sizeof header + header.path_length + header.public_length;
    char answer[1024], *request = malloc(length);
    if (!request)
        return 0;
    memcpy(request, &header, sizeof header);
    memcpy(request + sizeof header, key->path, header.path_length);
    memcpy(request + sizeof header + header.path_length, key->encoded, header.public_length);
    ssize_t said = orrery_vault_load(into, request, length, answer, sizeof answer);
    if (said > 0)
        vault_key_complain("%.*s", (int)said, answer);
    else if (said < 0)
        vault_key_complain("loading %s: %s", key->path, orrery_last_error());
    free(request);
    return said == 0;
}

/* As the provider's key.c has it: a version, the path, the public key. */
static int parse(struct vault_key *key, const unsigned char *data, long length, EVP_PKEY **public) {
    const unsigned char *at = data, *end = data + length, *content;
    long size;
    if (!(content = der_element(&at, end, V_ASN1_SEQUENCE, &size)) || at != end)
        return 0;
    at = content;
    if (!(content = der_element(&at, end, V_ASN1_INTEGER, &size)) || size != 1 || *content != 1)
        return 0;
    if (!(content = der_element(&at, end, V_ASN1_UTF8STRING, &size)) || size < 2 || *content != '/' ||
        memchr(content, 0, size))
        return 0;
    key->path = strndup((const char *)content, size);
    key->encoded_length = end - at;
    key->encoded = malloc(key->encoded_length);
    if (!key->path || !key->encoded)
        return 0;
    memcpy(key->encoded, at, key->encoded_length);
    SHA256(key->encoded, key->encoded_length, key->fingerprint);
    *public = d2i_PUBKEY(NULL, &at, end - at);
    return *public && at == end;
}

struct vault_key *vault_key_read(const char *path, EVP_PKEY **public) {
    char *name = NULL, *header = NULL;
    unsigned char *data = NULL;
    long length = 0;
    FILE *file = fopen(path, "re");
    if (!file) {
        vault_key_complain("cannot open %s: %s", path, strerror(errno));
        return NULL;
    }
    struct vault_key *key = calloc(1, sizeof *key);
    int good = key && PEM_read(file, &name, &header, &data, &length) && !strcmp(name, REFERENCE_NAME) &&
               parse(key, data, length, public);
    fclose(file);
    OPENSSL_free(name);
    OPENSSL_free(header);
    OPENSSL_free(data);
    if (!good)
        vault_key_complain("%s is not a reference to a key in a vault: make it again (orrery vault wrap KEY)",
                           path);
    struct orrery_vault *with = good ? vault_other_than(NULL) : NULL;
    if (with && load(with, key))
        return key;
    vault_key_free(key);
    return NULL;
}

void vault_key_free(struct vault_key *key) {
    if (!key)
        return;
    free(key->path);
    free(key->encoded);
    free(key);
}

ssize_t vault_key_call(const struct vault_key *key, struct call_request *call, const void *data,
                       size_t length, void *answer, size_t room) {
    unsigned char request[sizeof *call + 4096];
    if (!key || length > sizeof request - sizeof *call) {
        vault_key_complain("%s", key ? "more data than a key of this kind takes" : "a key without a vault");
        return -1;
    }
    memcpy(call->key, key->fingerprint, FINGERPRINT);
    memcpy(request, call, sizeof *call);
    memcpy(request + sizeof *call, data, length);
    struct orrery_vault *with = vault_other_than(NULL);
    if (!with)
        return -1;
    ssize_t done = orrery_vault_call(with, request, sizeof *call + length, answer, room);
    if (done < 0 && (errno == EOWNERDEAD || errno == ENOKEY)) {
        /* Keeper and spare were killed. Who may read the key file can do without them. */
        struct orrery_vault *next = errno == EOWNERDEAD ? vault_other_than(with) : with;
        if (next && load(next, key))
            done = orrery_vault_call(next, request, sizeof *call + length, answer, room);
    }
    if (done < 0)
        vault_key_complain(
            errno == EACCES ? "the vault's policy does not allow this: it needs the command ALLOW:%s" : "%s",
            errno == EACCES    ? policy_word(call)
            : errno == EBADMSG ? "the vault refuses to work with these data"
                               : orrery_last_error());
    return done;
}
