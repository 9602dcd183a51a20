/* CRC-64 (ECMA-182, reflected), continued from `sum`; 0 at the beginning. */
#ifndef KV_CHECKSUM_H
#define KV_CHECKSUM_H

#include <stddef.h>
#include <stdint.h>

uint64_t checksum(uint64_t sum, const void *data, size_t size);

#endif
