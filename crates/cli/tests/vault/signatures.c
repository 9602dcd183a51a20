/*
 * Signs with a key, by OpenSSL, here and in copies of the process, and checks each signature. Prints the first half of each,
 * which tells of which secret number it was made.
 *
 *     signatures KEY COPIES SIGNATURES
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <openssl/ecdsa.h>
#include <openssl/err.h>
#include <openssl/pem.h>

static void need(int good, const char *what) {
    if (good)
        return;
    fprintf(stderr, "%s\n", what);
    ERR_print_errors_fp(stderr);
    _exit(1);
}

static void sign(EVP_PKEY *pkey, int times, unsigned char who) {
    EVP_PKEY_CTX *signer = EVP_PKEY_CTX_new(pkey, NULL), *verifier = EVP_PKEY_CTX_new(pkey, NULL);
    need(signer && EVP_PKEY_sign_init(signer) > 0, "sign");
    need(verifier && EVP_PKEY_verify_init(verifier) > 0, "verify");
    for (int i = 0; i < times; i++) {
        /* Each two signatures are of one digest. */
        unsigned char digest[32] = {who, i / 2}, signature[160];
        size_t length = sizeof signature;
        need(EVP_PKEY_sign(signer, signature, &length, digest, sizeof digest) > 0, "sign");
        need(EVP_PKEY_verify(verifier, signature, length, digest, sizeof digest) == 1, "a false signature");
        digest[31] ^= 1;
        need(EVP_PKEY_verify(verifier, signature, length, digest, sizeof digest) != 1, "signs anything");
        const unsigned char *at = signature;
        ECDSA_SIG *pair = d2i_ECDSA_SIG(NULL, &at, length);
        need(pair != NULL, "DER");
        char *first = BN_bn2hex(ECDSA_SIG_get0_r(pair)), line[128];
        int written = snprintf(line, sizeof line, "%s\n", first);
        need(write(1, line, written) == written, "write");
        OPENSSL_free(first);
        ECDSA_SIG_free(pair);
    }
    EVP_PKEY_CTX_free(signer);
    EVP_PKEY_CTX_free(verifier);
}

int main(int count, char **arguments) {
    need(count == 4, "signatures KEY COPIES SIGNATURES");
    FILE *file = fopen(arguments[1], "re");
    EVP_PKEY *pkey = file ? PEM_read_PrivateKey(file, NULL, NULL, NULL) : NULL;
    need(pkey != NULL, "no key");
    int copies = atoi(arguments[2]), times = atoi(arguments[3]);
    sign(pkey, 1, 0);
    for (int copy = 1; copy <= copies; copy++)
        if (!fork()) {
            sign(pkey, times, copy);
            _exit(0);
        }
    sign(pkey, times, 100);
    int status, good = 1;
    while (wait(&status) > 0)
        good = good && !status;
    EVP_PKEY_free(pkey);
    return !good;
}
