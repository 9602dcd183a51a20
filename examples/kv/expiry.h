/* Expiry: an orbit looks through the deadlines and pushes back those that have passed; main looks again, and
 * deletes. */
#ifndef KV_EXPIRY_H
#define KV_EXPIRY_H

#include "orbits.h"

extern struct auxiliary expiry;

#endif
