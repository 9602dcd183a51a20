/* malloc(3) and its relatives, in the heap of the current instance. Outside of instances they are the C library's. */
#include "own.h"

#include <errno.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* How malloc(3) aligns. */
#define ALIGNMENT 16

static int in_heap(const void *memory) {
    return orrery_cls_host && (uintptr_t)memory - orrery_cls_host->heap_start < orrery_cls_host->heap_size;
}

static void *allocate(size_t size, size_t alignment) {
    void *instance = own()->instance;
    void *memory = orrery_cls_host->allocate(instance, size, alignment);
    if (!memory)
        errno = ENOMEM;
    return memory;
}

HIDDEN void *__orrery_cls_malloc(size_t size) {
    return own()->instance ? allocate(size, ALIGNMENT) : malloc(size);
}

HIDDEN void *__orrery_cls_calloc(size_t count, size_t size) {
    if (!own()->instance)
        return calloc(count, size);
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    void *memory = allocate(bytes, ALIGNMENT);
    return memory ? memset(memory, 0, bytes) : NULL;
}

HIDDEN void __orrery_cls_free(void *memory) {
    if (in_heap(memory))
        orrery_cls_host->release(own()->instance, memory);
    else
        free(memory);
}

HIDDEN void *__orrery_cls_realloc(void *memory, size_t size) {
    if (!memory)
        return __orrery_cls_malloc(size);
    if (!in_heap(memory))
        return realloc(memory, size);
    if (size == 0) {
        __orrery_cls_free(memory);
        return NULL;
    }
    void *moved = orrery_cls_host->resize(own()->instance, memory, size);
    if (!moved)
        errno = ENOMEM;
    return moved;
}

HIDDEN void *__orrery_cls_reallocarray(void *memory, size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    return __orrery_cls_realloc(memory, bytes);
}

static int is_alignment(size_t alignment) { return alignment != 0 && (alignment & (alignment - 1)) == 0; }

HIDDEN int __orrery_cls_posix_memalign(void **place, size_t alignment, size_t size) {
    if (!own()->instance)
        return posix_memalign(place, alignment, size);
    if (!is_alignment(alignment) || alignment % sizeof(void *) != 0)
        return EINVAL;
    int before = errno;
    void *memory = allocate(size, alignment);
    errno = before;
    if (!memory)
        return ENOMEM;
    *place = memory;
    return 0;
}

HIDDEN void *__orrery_cls_aligned_alloc(size_t alignment, size_t size) {
    if (!own()->instance)
        return aligned_alloc(alignment, size);
    if (!is_alignment(alignment)) {
        errno = EINVAL;
        return NULL;
    }
    return allocate(size, alignment);
}

HIDDEN void *__orrery_cls_memalign(size_t alignment, size_t size) {
    return __orrery_cls_aligned_alloc(alignment, size);
}

HIDDEN void *__orrery_cls_valloc(size_t size) { return __orrery_cls_aligned_alloc(4096, size); }

HIDDEN size_t __orrery_cls_malloc_usable_size(void *memory) {
    return in_heap(memory) ? orrery_cls_host->usable_size(own()->instance, memory)
                           : malloc_usable_size(memory);
}

static char *copy_text(const char *text, size_t length) {
    char *copy = __orrery_cls_malloc(length + 1);
    if (copy) {
        memcpy(copy, text, length);
        copy[length] = 0;
    }
    return copy;
}

HIDDEN char *__orrery_cls_strdup(const char *text) { return copy_text(text, strlen(text)); }

HIDDEN char *__orrery_cls_strndup(const char *text, size_t limit) {
    return copy_text(text, strnlen(text, limit));
}

/* The C library would grow a line of ours by its own realloc(3). */
HIDDEN ssize_t __orrery_cls_getdelim(char **line, size_t *size, int delimiter, FILE *stream) {
    if (!own()->instance)
        return getdelim(line, size, delimiter, stream);
    if (!line || !size) {
        errno = EINVAL;
        return -1;
    }
    char *read = NULL;
    size_t room = 0;
    ssize_t length = getdelim(&read, &room, delimiter, stream);
    if (length >= 0 && (!*line || *size < (size_t)length + 1)) {
        char *larger = __orrery_cls_realloc(*line, (size_t)length + 1);
        if (larger) {
            *line = larger;
            *size = (size_t)length + 1;
        } else {
            length = -1;
        }
    }
    if (length >= 0)
        memcpy(*line, read, (size_t)length + 1);
    free(read);
    return length;
}

HIDDEN ssize_t __orrery_cls_getline(char **line, size_t *size, FILE *stream) {
    return __orrery_cls_getdelim(line, size, '\n', stream);
}
