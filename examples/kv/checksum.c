#include "checksum.h"

#include <stdbool.h>
#include <string.h>

#define POLYNOMIAL 0xc96c5795d7870f42

/* tables[n][b]: byte b followed by n zero bytes, so that eight bytes take one step. */
static uint64_t tables[8][256];

static void fill(void) {
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = sum & 1 ? (sum >> 1) ^ POLYNOMIAL : sum >> 1;
        tables[0][byte] = sum;
    }
    for (unsigned byte = 0; byte < 256; byte++) {
        for (int n = 1; n < 8; n++)
            tables[n][byte] = (tables[n - 1][byte] >> 8) ^ tables[0][tables[n - 1][byte] & 0xff];
    }
}

uint64_t checksum(uint64_t sum, const void *data, size_t size) {
    static bool filled;
    if (!filled) {
        fill();
        filled = true;
    }
    const unsigned char *bytes = data;
    sum = ~sum;
    for (; size >= 8; size -= 8, bytes += 8) {
        uint64_t word;
        memcpy(&word, bytes, sizeof word);
        word ^= sum;
        sum = 0;
        for (int n = 0; n < 8; n++)
            sum ^= tables[7 - n][(word >> (8 * n)) & 0xff];
    }
    for (; size > 0; size--, bytes++)
        sum = (sum >> 8) ^ tables[0][(sum ^ *bytes) & 0xff];
    return ~sum;
}
