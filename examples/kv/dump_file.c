#include "dump_file.h"

#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "checksum.h"
#include "clock.h"

#define MAGIC "ORRERYKV\1"
#define MAGIC_SIZE (sizeof MAGIC - 1)
#define CHUNK ((size_t)256 << 10)

/* ---- writing ---- */

struct writer {
    int fd;
    int error; /* the first one; then nothing more is written */
    uint64_t sum;
    size_t length;
    size_t keys;
    size_t half;
    enum trouble trouble;
    const struct deadlines *deadlines;
    char chunk[CHUNK];
};

static void write_out(struct writer *writer, const char *data, size_t size) {
    while (size > 0 && !writer->error) {
        ssize_t written = write(writer->fd, data, size);
        if (written < 0 && errno != EINTR)
            writer->error = errno;
        if (written > 0) {
            data += written;
            size -= (size_t)written;
        }
    }
}

static void flush(struct writer *writer) {
    writer->sum = checksum(writer->sum, writer->chunk, writer->length);
    write_out(writer, writer->chunk, writer->length);
    writer->length = 0;
}

static void put(struct writer *writer, const void *data, size_t size) {
    const char *bytes = data;
    while (size > 0) {
        size_t part = CHUNK - writer->length < size ? CHUNK - writer->length : size;
        memcpy(writer->chunk + writer->length, bytes, part);
        writer->length += part;
        bytes += part;
        size -= part;
        if (writer->length == CHUNK)
            flush(writer);
    }
}

static void put_byte(struct writer *writer, uint8_t byte) { put(writer, &byte, 1); }
static void put_number(struct writer *writer, uint64_t number) { put(writer, &number, sizeof number); }

static void put_string(struct writer *writer, struct slice string) {
    put_number(writer, string.length);
    put(writer, string.data, string.length);
}

static void put_field(struct node *node, void *context) {
    put_string(context, node_key(node));
    put_string(context, text_slice(((struct field *)node)->value));
}

static void put_entry(struct node *node, void *context) {
    struct writer *writer = context;
    const struct entry *entry = (const struct entry *)node;
    if (writer->keys++ == writer->half)
        trouble_make(writer->trouble);
    put_byte(writer, (uint8_t)(entry->type + 1));
    put_number(writer, entry->deadline ? (uint64_t)writer->deadlines->list[entry->deadline - 1].at : 0);
    put_string(writer, node_key(node));
    switch (entry->type) {
    case TYPE_STRING:
        put_string(writer, text_slice(entry->value.text));
        break;
    case TYPE_LIST:
        put_number(writer, entry->value.list->count);
        for (size_t i = 0; i < entry->value.list->count; i++)
            put_string(writer, text_slice(list_at(entry->value.list, i)));
        break;
    case TYPE_HASH:
        put_number(writer, entry->value.hash->fields.count);
        table_each(&entry->value.hash->fields, put_field, writer);
        break;
    }
}

/* A rename lasts when the directory is on the disk. */
static int sync_folder(const char *path) {
    char copy[1024];
    snprintf(copy, sizeof copy, "%s", path);
    int fd = open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int error = fd < 0 || fsync(fd) < 0 ? errno : 0;
    if (fd >= 0)
        close(fd);
    return error;
}

int64_t dump_write(const char *path, const char *temporary, const struct table *keys,
                   const struct deadlines *deadlines, enum trouble trouble) {
    struct writer *writer = malloc(sizeof *writer);
    if (!writer)
        return -ENOMEM;
    writer->error = 0;
    writer->sum = writer->length = writer->keys = 0;
    writer->half = keys->count / 2;
    writer->trouble = trouble;
    writer->deadlines = deadlines;
    writer->fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
    if (writer->fd < 0) {
        free(writer);
        return -errno;
    }
    put(writer, MAGIC, MAGIC_SIZE);
    table_each(keys, put_entry, writer);
    if (keys->count == 0)
        trouble_make(trouble);
    put_byte(writer, 0);
    put_number(writer, writer->keys);
    flush(writer);
    write_out(writer, (const char *)&writer->sum, sizeof writer->sum);
    int error = writer->error;
    if (!error && fsync(writer->fd) < 0)
        error = errno;
    if (close(writer->fd) < 0 && !error)
        error = errno;
    if (!error && rename(temporary, path) < 0)
        error = errno;
    if (!error)
        error = sync_folder(path);
    int64_t result = error ? -error : (int64_t)writer->keys;
    free(writer);
    return result;
}

/* ---- reading ---- */

struct reader {
    FILE *file;
    const char *path;
    uint64_t sum;
};

static void take(struct reader *reader, void *data, size_t size) {
    if (fread(data, 1, size, reader->file) != size)
        errx(1, "%s is cut off; put it away to start without data", reader->path);
    reader->sum = checksum(reader->sum, data, size);
}

static uint8_t take_byte(struct reader *reader) {
    uint8_t byte;
    take(reader, &byte, 1);
    return byte;
}

static uint64_t take_number(struct reader *reader) {
    uint64_t number;
    take(reader, &number, sizeof number);
    return number;
}

/* To be freed. */
static struct slice take_string(struct reader *reader) {
    uint64_t length = take_number(reader);
    if (length > TEXT_MAX)
        errx(1, "%s is damaged: a string of %llu bytes", reader->path, (unsigned long long)length);
    char *data = malloc(length + 1);
    if (!data)
        err(1, "%s", reader->path);
    take(reader, data, length);
    return (struct slice){data, length};
}

static void drop(struct slice string) { free((char *)(uintptr_t)string.data); }

static void take_value(struct reader *reader, struct slice key, unsigned type, int64_t deadline) {
    struct entry *entry;
    if (type == TYPE_STRING) {
        struct slice value = take_string(reader);
        entry = store_put_text(key, value);
        drop(value);
    } else {
        entry = store_put(key, (enum type)type);
        for (uint64_t count = take_number(reader); count > 0; count--) {
            struct slice element = take_string(reader);
            if (type == TYPE_LIST) {
                list_push(entry->value.list, false, element);
            } else {
                struct slice value = take_string(reader);
                hash_set(entry->value.hash, element, value);
                drop(value);
            }
            drop(element);
        }
        store_changed(entry);
    }
    store_set_deadline(entry, deadline);
}

int64_t dump_load(const char *path) {
    struct reader reader = {fopen(path, "rbe"), path, 0};
    if (!reader.file && errno == ENOENT)
        return -1;
    if (!reader.file)
        err(1, "%s", path);
    char magic[MAGIC_SIZE];
    take(&reader, magic, sizeof magic);
    if (memcmp(magic, MAGIC, sizeof magic) != 0)
        errx(1, "%s is no dump of this server's", path);
    uint64_t keys = 0;
    unsigned type;
    while ((type = take_byte(&reader)) != 0) {
        if (type > TYPES)
            errx(1, "%s is damaged: there is no type %u", path, type);
        int64_t deadline = (int64_t)take_number(&reader);
        struct slice key = take_string(&reader);
        take_value(&reader, key, type - 1, deadline);
        drop(key);
        keys++;
    }
    uint64_t count = take_number(&reader), sum = reader.sum, written;
    take(&reader, &written, sizeof written);
    if (count != keys || written != sum)
        errx(1, "%s is damaged: its checksum is wrong; put it away to start without data", path);
    fclose(reader.file);
    return (int64_t)keys;
}
