/*
 * Reading DER, in which references to keys are written.
 */
#ifndef ORRERY_DER_H
#define ORRERY_DER_H

#include <stddef.h>

#include <openssl/asn1.h>

/* Takes one element of the given kind off the front; its content, or NULL. */
static inline const unsigned char *der_element(const unsigned char **at, const unsigned char *end, int kind,
                                               long *length) {
    int tag, class;
    const unsigned char *content = *at;
    int flags = ASN1_get_object(&content, length, &tag, &class, end - *at);
    if (flags & 0x80 || tag != kind || class != V_ASN1_UNIVERSAL || *length > end - content)
        return NULL;
    *at = content + *length;
    return content;
}

#endif
