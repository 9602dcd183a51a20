/*
 * Orrery: one copy of identical code and read-only data, shared on request by content.
 *
 *     struct orrery_object *words = orrery_object_register(bytes, length, 0);
 *     if (!words)
 *         err(1, "orrery_object_register: %s", orrery_last_error());
 *     const char *shared = orrery_object_map(words, 0);     // the same pages for everybody who has the same bytes
 *     ...
 *     orrery_object_release(words);
 *
 *     orrery_object_publish(table, size, ORRERY_OBJECT_FREEZE);       // this program's own copy becomes the shared
 *     one, in place
 *
 * Link with -lorrery; `orrery orc serve` runs the store. After "ORC: Increasing Cloud Memory Density via Object
 * Reuse with Capabilities" (Sartakov et al., OSDI 2023), on a stock Linux kernel.
 *
 * OBJECTS
 *
 * An object is bytes that never change, in memory of the store's own that nobody can write, resize or unseal. It is
 * named by the BLAKE3 hash of its bytes. Whoever registers bytes, or asks by name, gets a descriptor of that memory:
 * a capability that shows these bytes for ever and can do nothing else. The store keeps an object while somebody
 * holds it, and a little longer. What is mapped stays mapped whatever becomes of the store.
 *
 * Who shares with whom is the store's affair: users, or tenants with sockets of their own, are apart, and nobody can
 * find out by asking what strangers have.
 *
 * THREADS, FORKS
 *
 * All functions may be called from any thread. A forked child has what its parent had and makes a connection of its
 * own when it first needs one; it must not be forked while another thread is in one of these functions.
 *
 * ERRORS
 *
 * Calls that fail return -1 or NULL, set errno, and have changed nothing; orrery_last_error returns a text.
 *
 *   ENOTCONN      there is no store, or not one that this user may trust
 *   ENOENT        no object of that name, as far as this user may know
 *   EDQUOT        the quota is used up by objects that are held
 *   EFBIG         no bytes at all, or more than the store takes
 *   EACCES        the store's policy does not allow such an object to be executable or public; the object is no code
 *   EBADMSG       other bytes than the name says
 *   EBADF         not a memory file, or not open for reading
 *   EINVAL        a range that cannot be published, flags that there are not
 *   EBUSY         the store has too much to do
 *   EPROTO        the store broke off, or talks nonsense
 *   others        what a system call answered: ENOMEM, EMFILE ...
 */
#ifndef ORRERY_OBJECT_H
#define ORRERY_OBJECT_H

#include <orrery/error.h>

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct orrery_object;

/* The name of an object: the BLAKE3 hash of its bytes. */
struct orrery_object_id {
    unsigned char bytes[32];
};

enum orrery_object_flags {
    ORRERY_OBJECT_EXECUTABLE = 1, /* it may be mapped executable: if the store allows it */
    ORRERY_OBJECT_PUBLIC = 2,     /* it is for everybody: for the superuser, and whom the store trusts */
    ORRERY_OBJECT_OWN_PAGES = 4,  /* it has pages of its own, however small it is */
    ORRERY_OBJECT_FREEZE = 8      /* orrery_object_publish: writable pages become read-only, for good */
};

/*
 * Connects to the store in a directory, or at a socket, in place of the usual one (ORRERY_ORC, else /run/orrery/orc
 * or $XDG_RUNTIME_DIR/orrery/orc). What was had before stays. Without this, the first call connects to the usual one.
 */
int orrery_object_connect(const char *directory);

/* Stores the name of these bytes in *id, which is not among them. */
int orrery_object_hash(const void *bytes, size_t length, struct orrery_object_id *id);

/* Registers bytes with the store, which copies them unless it has them, and returns their object. Flags:
 * EXECUTABLE, PUBLIC, ALONE. */
struct orrery_object *orrery_object_register(const void *bytes, size_t length, unsigned flags);

/* Registers the first `length` bytes of a memory file (memfd_create(2)). */
struct orrery_object *orrery_object_register_file(int memory, size_t length, unsigned flags);

/*
 * Returns the object of the bytes that a file has now, so that equal files, wherever they lie, are in memory once:
 * for models, dictionaries, tables, which are mapped instead of being read.
 */
struct orrery_object *orrery_object_open(const char *path);

/* Returns the object of a name. */
struct orrery_object *orrery_object_request(const struct orrery_object_id *id);

/*
 * Maps the object; with ORRERY_OBJECT_EXECUTABLE in the flags, as code. The address holds until
 * orrery_object_release. Mapping it twice gives the same address.
 */
const void *orrery_object_map(struct orrery_object *object, unsigned flags);

/* Returns the length of the object in bytes, and 0 for NULL. */
size_t orrery_object_length(const struct orrery_object *object);

/* Stores the name of the object in *id. */
int orrery_object_identify(const struct orrery_object *object, struct orrery_object_id *id);

/*
 * The descriptor of its memory, to be handed to others, say; it is closed by orrery_object_release. The object
 * begins at *offset there: small objects share pages.
 */
int orrery_object_fd(const struct orrery_object *object, size_t *offset);

/* Unmaps and releases the object. orrery_object_release(NULL) is a no-op. */
int orrery_object_release(struct orrery_object *object);

/*
 * Replaces a range of this program's own memory by the shared object of the same bytes, at the same address, while
 * any number of threads read or run it. The range is whole pages of private memory that nobody can write; with
 * ORRERY_OBJECT_FREEZE writable pages are made read-only first. Nobody may unmap or protect the range meanwhile.
 * Returns the object, whose release leaves the range as it is.
 */
struct orrery_object *orrery_object_publish(void *start, size_t length, unsigned flags);

#ifdef __cplusplus
}
#endif

#endif
