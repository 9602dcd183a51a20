/*
 * The dump's format.
 *
 *   "ORRERYKV" version
 *   for each key: 1 + type, deadline, key, then a string, or a count and so many strings, or a count and so
 * many pairs 0, count of keys, checksum of all before it
 *
 * Numbers have eight bytes in the machine's order, but for the version and types, which have one. Strings
 * follow their lengths.
 */
#ifndef KV_DUMP_FILE_H
#define KV_DUMP_FILE_H

#include "store.h"
#include "trouble.h"

/*
 * Writes it beside `path` and puts it into place when it is on the disk. Returns how many keys there are, or
 * -errno. Changes nothing in memory, and makes trouble half way.
 */
int64_t dump_write(const char *path, const char *temporary, const struct table *keys,
                   const struct deadlines *deadlines, enum trouble trouble);

/* Loads it into the empty store: how many keys, -1 where there is no file. Ends the program where it is
 * damaged. */
int64_t dump_load(const char *path);

#endif
