/*
 * SQLite for WebAssembly, as make bench B=orc-instances has it in instances of wasmtime: databases are in memory, so there is a file
 * system that has no files, and the module imports nothing. Compiled with SQLITE_OS_OTHER, together with sqlite3.c.
 */
#include <stddef.h>
#include <string.h>

#include "sqlite3.h"

static int no_open(sqlite3_vfs *vfs, sqlite3_filename name, sqlite3_file *file, int flags, int *out) {
    (void)vfs, (void)name, (void)flags, (void)out;
    file->pMethods = NULL;
    return SQLITE_CANTOPEN;
}

static int no_delete(sqlite3_vfs *vfs, const char *name, int sync) {
    (void)vfs, (void)name, (void)sync;
    return SQLITE_IOERR_DELETE;
}

static int no_access(sqlite3_vfs *vfs, const char *name, int flags, int *out) {
    (void)vfs, (void)name, (void)flags;
    *out = 0;
    return SQLITE_OK;
}

static int same_name(sqlite3_vfs *vfs, const char *name, int size, char *out) {
    (void)vfs;
    if (strlen(name) >= (size_t)size)
        return SQLITE_CANTOPEN;
    strcpy(out, name);
    return SQLITE_OK;
}

/* Nothing that the benchmark does depends on it. */
static int no_randomness(sqlite3_vfs *vfs, int size, char *out) {
    (void)vfs;
    memset(out, 1, (size_t)size);
    return size;
}

static int no_sleep(sqlite3_vfs *vfs, int microseconds) {
    (void)vfs;
    return microseconds;
}

static int no_time(sqlite3_vfs *vfs, double *out) {
    (void)vfs;
    *out = 2440587.5;
    return SQLITE_OK;
}

static sqlite3_vfs none = {
    .iVersion = 1,
    .szOsFile = sizeof(sqlite3_file),
    .mxPathname = 64,
    .zName = "none",
    .xOpen = no_open,
    .xDelete = no_delete,
    .xAccess = no_access,
    .xFullPathname = same_name,
    .xRandomness = no_randomness,
    .xSleep = no_sleep,
    .xCurrentTime = no_time,
};

int sqlite3_os_init(void) { return sqlite3_vfs_register(&none, 1); }

int sqlite3_os_end(void) { return SQLITE_OK; }

/* Finds a row, by one call into the module; returns what sqlite3_step returned. */
__attribute__((export_name("row"))) int row(sqlite3_stmt *statement) {
    int code = sqlite3_step(statement);

    sqlite3_reset(statement);
    return code;
}
