#include "policy.h"

#include <string.h>
#include <strings.h>

#include <openssl/rsa.h>

static const struct {
    const char *name;
    enum allowed value;
} words[] = {{"decrypt", ALLOW_DECRYPT}, {"any-digest", ALLOW_ANY_DIGEST}, {"raw", ALLOW_RAW}};

bool policy_parse(const char *list, unsigned *allowed) {
    static const char separators[] = ", \t";
    *allowed = 0;
    for (list += strspn(list, separators); *list; list += strspn(list, separators)) {
        size_t length = strcspn(list, separators), i = 0;
        while (i < sizeof words / sizeof *words &&
               (strncmp(list, words[i].name, length) || words[i].name[length]))
            i++;
        if (i == sizeof words / sizeof *words)
            return false;
        *allowed |= words[i].value;
        list += length;
    }
    return true;
}

/* SHA-2 of the lengths that certificates and TLS use. A name that is missing here is refused, never signed. */
static bool is_sha2(const char *name) {
    static const char *const prefixes[] = {"SHA2-", "SHA-", "SHA"}, *const sizes[] = {"224", "256", "384",
                                                                                      "512"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++)
        if (!strncasecmp(name, prefixes[i], strlen(prefixes[i])))
            for (size_t j = 0; j < sizeof sizes / sizeof *sizes; j++)
                if (!strcmp(name + strlen(prefixes[i]), sizes[j]))
                    return true;
    return false;
}

/* Whether these are the DigestInfo of a SHA-2 digest (RFC 8017, 9.2): then its name is in it. */
static bool is_sha2_digest_info(const unsigned char *data, size_t length) {
    static const unsigned char oid[] = {0x06, 0x09, 0x60, 0x86, 0x48, 0x01, 0x65, 0x03, 0x04, 0x02};
    /* The last byte of the identifier, and the digest's length. */
    static const unsigned char kinds[][2] = {{1, 32}, {2, 48}, {3, 64}, {4, 28}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        unsigned char size = kinds[i][1];
        unsigned char prefix[19] = {0x30, 17 + size, 0x30, 13};
        memcpy(prefix + 4, oid, sizeof oid);
        memcpy(prefix + 14, (unsigned char[]){kinds[i][0], 0x05, 0x00, 0x04, size}, 5);
        if (length == sizeof prefix + size && !memcmp(data, prefix, sizeof prefix))
            return true;
    }
    return false;
}

/* Mask generation function 1 (RFC 8017, B.2.1), applied to `data`. */
static bool unmask(unsigned char *data, size_t length, const unsigned char *seed, const EVP_MD *digest) {
    unsigned char block[EVP_MAX_MD_SIZE + 4], mask[EVP_MAX_MD_SIZE];
    size_t size = EVP_MD_get_size(digest);
    memcpy(block, seed, size);
    for (size_t at = 0, count = 0; at < length; at += size, count++) {
        memcpy(block + size, (unsigned char[]){count >> 24, count >> 16, count >> 8, count}, 4);
        if (!EVP_Digest(block, size + 4, mask, NULL, digest, NULL))
            return false;
        for (size_t i = 0; i < size && at + i < length; i++)
            data[at + i] ^= mask[i];
    }
    return true;
}

/*
 * Whether these are a digest that was encoded for PSS (RFC 8017, 9.1.1) with SHA-2 and a salt as long as the digest, as TLS has
 * it. The older interface of OpenSSL pads by itself and asks for RSA without padding; this is told from other data by the
 * zeros before the salt, of which so many are demanded that nobody finds a number that looks so by chance.
 */
static bool is_pss_encoded(EVP_PKEY *pkey, const unsigned char *data, size_t length) {
    enum { ZEROS = 16 };
    const EVP_MD *const digests[] = {EVP_sha256(), EVP_sha384(), EVP_sha512()};
    int bits = EVP_PKEY_get_bits(pkey) - 1;
    size_t whole = (bits + 7) / 8;
    unsigned char masked[2048];
    if (bits <= 0 || length != (size_t)EVP_PKEY_get_size(pkey) || length > sizeof masked ||
        data[length - 1] != 0xbc)
        return false;
    if (length > whole && *data++)
        return false;
    for (size_t i = 0; i < sizeof digests / sizeof *digests; i++) {
        size_t size = EVP_MD_get_size(digests[i]);
        if (whole < 2 * size + 2 + ZEROS)
            continue;
        size_t zeros = whole - 2 * size - 2, masked_length = whole - size - 1, j = 0;
        memcpy(masked, data, masked_length);
        if (masked[0] >> (8 - (8 * whole - bits)) ||
            !unmask(masked, masked_length, data + masked_length, digests[i]))
            continue;
        masked[0] &= 0xff >> (8 * whole - bits);
        while (j < zeros && !masked[j])
            j++;
        if (j == zeros && masked[zeros] == 1)
            return true;
    }
    return false;
}

enum allowed policy_needed(EVP_PKEY *pkey, const struct call_request *call, const void *data, size_t length) {
    if (call->operation == OPERATION_DECRYPT)
        return call->padding == RSA_NO_PADDING ? ALLOW_DECRYPT | ALLOW_RAW : ALLOW_DECRYPT;
    if (EVP_PKEY_is_a(pkey, "ED25519"))
        return 0;
    if (*call->mask_digest && !is_sha2(call->mask_digest))
        return ALLOW_ANY_DIGEST;
    bool rsa = EVP_PKEY_is_a(pkey, "RSA") || EVP_PKEY_is_a(pkey, "RSA-PSS");
    /* The length alone says as much of an ECDSA digest as its name does. */
    if (!rsa)
        return is_sha2(call->digest) || (!*call->digest && (length == 32 || length == 48 || length == 64))
                   ? 0
                   : ALLOW_ANY_DIGEST;
    switch (call->padding) {
    case RSA_NO_PADDING:
        return is_pss_encoded(pkey, data, length) ? 0 : ALLOW_RAW;
    case RSA_PKCS1_PADDING:
        return is_sha2(call->digest) || (!*call->digest && is_sha2_digest_info(data, length))
                   ? 0
                   : ALLOW_ANY_DIGEST;
    case RSA_PKCS1_PSS_PADDING:
        return is_sha2(call->digest) ? 0 : ALLOW_ANY_DIGEST;
    default:
        return ALLOW_RAW;
    }
}

const char *policy_word(const struct call_request *call) {
    bool raw = call->padding == RSA_NO_PADDING || call->padding == RSA_X931_PADDING;
    if (call->operation == OPERATION_DECRYPT)
        return raw ? "decrypt, raw" : "decrypt";
    return raw ? "raw" : "any-digest";
}
