/*
 * Orrery: why a function failed.
 *
 * Every function that fails returns -1, or a null pointer where it returns a pointer, sets errno, and stores a text.
 */
#ifndef ORRERY_ERROR_H
#define ORRERY_ERROR_H

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Returns a text that describes the last failure in the calling thread, or, after a resume (orrery/rollback.h), what
 * that could not restore. Returns a null pointer if there was neither. The text is valid until the next call of a
 * function of Orrery in this thread.
 */
const char *orrery_last_error(void);

#ifdef __cplusplus
}
#endif

#endif
