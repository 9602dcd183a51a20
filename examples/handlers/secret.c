/*
 * Denies openat of paths that contain "secret", with EACCES, as secret.wat does:
 *
 *     [[rule]]
 *     call    = "openat"
 *     handler = "secret.wasm"
 *
 * What was looked at is what is opened: the call gets the copy in place of the program's path, which another thread could change.
 */
#include <orrery/handler.h>

enum { PATH = 1, ROOM = 4096 };

static char path[ROOM];

static int begins(const char *text, const char *with) {
    while (*with)
        if (*text++ != *with++)
            return 0;
    return 1;
}

ORRERY_DECIDE(call) {
    int32_t length = orrery_copy_string(PATH, path, ROOM);
    /* An address that cannot be read: the kernel says so. */
    if (length == -ORRERY_EFAULT)
        return ORRERY_PASS;
    if (length < 0)
        return length;
    for (int32_t at = 0; at < length; at++)
        if (begins(path + at, "secret"))
            return ORRERY_FAIL(ORRERY_EACCES);
    return orrery_replace(PATH, path, (size_t)length);
}
