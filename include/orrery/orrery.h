/*
 * Orrery: the whole C interface. Link with -lorrery, and with -lorthros for orrery/failover.h.
 *
 * NAMES
 *
 *   - All functions and types begin with orrery_ and the name of their header's subject: orrery_context_switch.
 *     Constants begin with ORRERY_ and the same. The papers' own names are in orrery/compat/.
 *   - What orrery_X_create makes belongs to the caller alone; orrery_X_destroy ends it.
 *   - What other contexts or processes can hold, too, ends with its last holder; orrery_X_close closes the caller's
 *     handle.
 *   - Objects are shared by content: orrery_object_register, _request, _open and _publish return one,
 *     orrery_object_release releases it.
 *   - orrery_X_destroy, _close and _release of a null pointer are no-ops, unless their header documents an error.
 *
 * ERRORS
 *
 * A function that fails returns -1, or a null pointer where it returns a pointer, and sets errno to one of the
 * errors that its header documents. orrery_last_error (orrery/error.h) returns a text.
 *
 * OPTIONS
 *
 * A structure of options begins with its size in bytes. Initialise it with its macro, such as
 * ORRERY_SESSION_OPTIONS_INIT; 0 in every other member stands for the default. A program that was compiled with an
 * older header passes a smaller size: members that it does not know have their defaults. A program that was compiled
 * with a newer header passes a larger size: that works while the members that this library does not know are 0, and
 * fails with E2BIG otherwise.
 */
#ifndef ORRERY_ORRERY_H
#define ORRERY_ORRERY_H

#include <orrery/context.h>
#include <orrery/error.h>
#include <orrery/failover.h>
#include <orrery/hijack.h>
#include <orrery/instance.h>
#include <orrery/object.h>
#include <orrery/orbit.h>
#include <orrery/rollback.h>
#include <orrery/session.h>
#include <orrery/vault.h>

#endif
