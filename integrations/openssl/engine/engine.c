/*
 * An ENGINE of OpenSSL 1.1, for programs that insist on that older interface; OpenSSL 3 still takes it.
 *
 *     OPENSSL_ENGINES=/usr/local/lib/orrery/engines openssl s_server -engine orrery -keyform engine -key site.ref.pem ...
 *
 * Commands, which go into the engine's section of openssl.cnf or before its use (-pre in openssl-engine(1)), before a key is
 * read: VAULT, the program of the vault, and ALLOW, its policy.
 *
 * A key is an ordinary public one with a method of ours: what takes the private part goes to the vault. RSA pads here, as
 * OpenSSL has it done, and the vault does the rest; of EC it signs digests. Ed25519 has no place in this interface.
 */
#include "../policy.h"
#include "key.h"

#include <string.h>

#include <openssl/ec.h>
#include <openssl/engine.h>
#include <openssl/err.h>
#include <openssl/rsa.h>

static const char id[] = "orrery", name[] = "Orrery: private keys in a vault";

static int rsa_place = -1, ec_place = -1;
static RSA_METHOD *rsa_method;
static EC_KEY_METHOD *ec_method;

static void free_rsa_data(void *rsa, void *key, CRYPTO_EX_DATA *data, int place, long number, void *pointer) {
    (void)rsa, (void)data, (void)place, (void)number, (void)pointer;
    vault_key_free(key);
}

/* The private part of RSA: 0 is no length of a result. */
static int ask_rsa(RSA *rsa, enum operation operation, int length, const unsigned char *from,
                   unsigned char *to, int padding) {
    struct call_request call = {.operation = operation, .padding = padding};
    ssize_t done = vault_key_call(RSA_get_ex_data(rsa, rsa_place), &call, from, length, to, RSA_size(rsa));
    return done < 0 ? -1 : (int)done;
}

static int rsa_sign_raw(int length, const unsigned char *from, unsigned char *to, RSA *rsa, int padding) {
    return ask_rsa(rsa, OPERATION_SIGN, length, from, to, padding);
}

static int rsa_decrypt(int length, const unsigned char *from, unsigned char *to, RSA *rsa, int padding) {
    return ask_rsa(rsa, OPERATION_DECRYPT, length, from, to, padding);
}

static int ec_sign(int type, const unsigned char *digest, int length, unsigned char *signature,
                   unsigned *signature_length, const BIGNUM *inverse, const BIGNUM *point, EC_KEY *ec) {
    struct call_request call = {.operation = OPERATION_SIGN};
    (void)type, (void)inverse, (void)point;
    ssize_t done =
        vault_key_call(EC_KEY_get_ex_data(ec, ec_place), &call, digest, length, signature, ECDSA_size(ec));
    if (done < 0)
        return 0;
    *signature_length = done;
    return 1;
}

static ECDSA_SIG *ec_sign_parts(const unsigned char *digest, int length, const BIGNUM *inverse,
                                const BIGNUM *point, EC_KEY *ec) {
    unsigned char encoded[512];
    const unsigned char *at = encoded;
    unsigned size;
    if ((size_t)ECDSA_size(ec) > sizeof encoded ||
        !ec_sign(0, digest, length, encoded, &size, inverse, point, ec))
        return NULL;
    return d2i_ECDSA_SIG(NULL, &at, size);
}

/* Gives the public key to a method that knows where the private one is; takes `key` over where it succeeds. */
static EVP_PKEY *with_method(EVP_PKEY *public, struct vault_key *key) {
    EVP_PKEY *whole = EVP_PKEY_new();
    int done = 0;
    if (whole && EVP_PKEY_base_id(public) == EVP_PKEY_RSA) {
        RSA *rsa = EVP_PKEY_get1_RSA(public);
        done = rsa && RSA_set_method(rsa, rsa_method) && RSA_set_ex_data(rsa, rsa_place, key);
        if (done) {
            RSA_set_flags(rsa, RSA_FLAG_EXT_PKEY);
            key = NULL;
            done = EVP_PKEY_set1_RSA(whole, rsa);
        }
        RSA_free(rsa);
    } else if (whole && EVP_PKEY_base_id(public) == EVP_PKEY_EC) {
        EC_KEY *ec = EVP_PKEY_get1_EC_KEY(public);
        done = ec && EC_KEY_set_method(ec, ec_method) && EC_KEY_set_ex_data(ec, ec_place, key);
        if (done) {
            key = NULL;
            done = EVP_PKEY_set1_EC_KEY(whole, ec);
        }
        EC_KEY_free(ec);
    } else {
        vault_key_complain("this interface knows keys of type RSA and EC only: use the provider");
    }
    vault_key_free(key);
    if (done)
        return whole;
    EVP_PKEY_free(whole);
    return NULL;
}

static EVP_PKEY *load_private(ENGINE *engine, const char *path, UI_METHOD *ui, void *data) {
    EVP_PKEY *public = NULL;
    (void)engine, (void)ui, (void)data;
    struct vault_key *key = vault_key_read(path, &public);
    EVP_PKEY *whole = key ? with_method(public, key) : NULL;
    EVP_PKEY_free(public);
    return whole;
}

static EVP_PKEY *load_public(ENGINE *engine, const char *path, UI_METHOD *ui, void *data) {
    EVP_PKEY *public = NULL;
    (void)engine, (void)ui, (void)data;
    vault_key_free(vault_key_read(path, &public));
    return public;
}

#define COMMAND_VAULT ENGINE_CMD_BASE
#define COMMAND_ALLOW (ENGINE_CMD_BASE + 1)

static const ENGINE_CMD_DEFN commands[] = {
    {COMMAND_VAULT, "VAULT", "The program in which private keys live", ENGINE_CMD_FLAG_STRING},
    {COMMAND_ALLOW, "ALLOW", "What the vault does beside the signatures of TLS: " POLICY_WORDS,
     ENGINE_CMD_FLAG_STRING},
    {0, NULL, NULL, 0},
};

static int control(ENGINE *engine, int command, long number, void *pointer, void (*function)(void)) {
    (void)engine, (void)number, (void)function;
    if (command == COMMAND_ALLOW)
        return pointer && vault_policy(pointer);
    return command == COMMAND_VAULT && pointer && vault_program(pointer);
}

static int prepare(ENGINE *engine) {
    (void)engine;
    if (rsa_method)
        return 1;
    rsa_place = RSA_get_ex_new_index(0, NULL, NULL, NULL, free_rsa_data);
    ec_place = EC_KEY_get_ex_new_index(0, NULL, NULL, NULL, free_rsa_data);
    rsa_method = RSA_meth_dup(RSA_PKCS1_OpenSSL());
    ec_method = EC_KEY_METHOD_new(EC_KEY_OpenSSL());
    if (rsa_place < 0 || ec_place < 0 || !rsa_method || !ec_method)
        return 0;
    int (*sign_setup)(EC_KEY *, BN_CTX *, BIGNUM **, BIGNUM **) = NULL;
    EC_KEY_METHOD_get_sign(ec_method, NULL, &sign_setup, NULL);
    EC_KEY_METHOD_set_sign(ec_method, ec_sign, sign_setup, ec_sign_parts);
    return RSA_meth_set1_name(rsa_method, name) && RSA_meth_set_priv_enc(rsa_method, rsa_sign_raw) &&
           RSA_meth_set_priv_dec(rsa_method, rsa_decrypt);
}

static int bind(ENGINE *engine, const char *wanted) {
    if (wanted && strcmp(wanted, id))
        return 0;
    return ENGINE_set_id(engine, id) && ENGINE_set_name(engine, name) &&
           ENGINE_set_init_function(engine, prepare) &&
           ENGINE_set_load_privkey_function(engine, load_private) &&
           ENGINE_set_load_pubkey_function(engine, load_public) && ENGINE_set_cmd_defns(engine, commands) &&
           ENGINE_set_ctrl_function(engine, control);
}

__attribute__((visibility("default"))) IMPLEMENT_DYNAMIC_BIND_FN(bind);
__attribute__((visibility("default"))) IMPLEMENT_DYNAMIC_CHECK_FN();
