/*
 * Orrery's orbits and areas under the names of "Operating System Support for Safe and Efficient Auxiliary Execution" (Jing and
 * Huang, OSDI 2022), Table 1 and Figures 4, 7, 11.
 *
 * Each name stands for one of orrery/orbit.h, which documents it; names that the paper does not have are formed like its own.
 * New programs use that header. The orbit authors' user library, with other types, is orrery/compat/orbit/orbit.h; the two do
 * not mix in one source file.
 */
#ifndef ORRERY_COMPAT_ORBIT_H
#define ORRERY_COMPAT_ORBIT_H

#ifdef ORRERY_AUTHORS_ORBIT_H
#error "<orrery/compat/orbit.h> and the orbit authors' orbit.h do not mix in one source file"
#endif

#include <orrery/orbit.h>

#define orbit orrery_orbit
#define orbit_error orrery_last_error
#define pull_orbit orrery_orbit_pull
#define orbit_future_free orrery_orbit_future_destroy
#define orbit_update_free orrery_orbit_update_destroy
#define orbit_alloc orrery_area_alloc
#define orbit_alloc_aligned orrery_area_alloc_aligned
#define orbit_realloc orrery_area_realloc
#define orbit_free orrery_area_free
#define orbit_mode orrery_area_mode
#define orbit_area orrery_area
#define orbit_area_create orrery_area_create
#define orbit_area_create_with orrery_area_create_with
#define orbit_area_destroy orrery_area_destroy
#define orbit_area_contains orrery_area_contains
#define orbit_area_base orrery_area_base
#define orbit_area_use orrery_area_use
#define orbit_area_used orrery_area_used
#define orbit_area_options orrery_area_options
#define orbit_entry orrery_orbit_entry
#define orbit_restart orrery_orbit_restart
#define orbit_when_full orrery_orbit_when_full
#define orbit_reaper orrery_orbit_reaper
#define orbit_options orrery_orbit_options
#define orbit_create orrery_orbit_create
#define orbit_create_with orrery_orbit_create_with
#define orbit_destroy orrery_orbit_destroy
#define orbit_pid orrery_orbit_pid
#define orbit_alive orrery_orbit_alive
#define orbit_restarts orrery_orbit_restarts
#define orbit_inside orrery_orbit_inside
#define orbit_flags orrery_orbit_flags
#define orbit_call orrery_orbit_call
#define orbit_call_function orrery_orbit_call_function
#define orbit_call_async orrery_orbit_call_async
#define orbit_future orrery_orbit_future
#define orbit_future_get orrery_orbit_future_get
#define orbit_future_wait orrery_orbit_future_wait
#define orbit_future_cancel orrery_orbit_future_cancel
#define orbit_operation orrery_orbit_operation
#define orbit_update orrery_orbit_update
#define orbit_record orrery_orbit_record
#define orbit_record_type orrery_orbit_record_type
#define orbit_update_create orrery_orbit_update_create
#define orbit_update_add_data orrery_orbit_update_add_data
#define orbit_update_add_modify orrery_orbit_update_add_modify
#define orbit_update_add_operation orrery_orbit_update_add_operation
#define orbit_update_add_call orrery_orbit_update_add_call
#define orbit_push orrery_orbit_push
#define orbit_update_first orrery_orbit_update_first
#define orbit_update_next orrery_orbit_update_next
#define orbit_apply orrery_orbit_apply
#define orbit_apply_record orrery_orbit_apply_record
#define ORBIT_RESTART_NEVER ORRERY_ORBIT_RESTART_NEVER
#define ORBIT_RESTART_ON_CRASH ORRERY_ORBIT_RESTART_ON_CRASH
#define ORBIT_RESTART_ALWAYS ORRERY_ORBIT_RESTART_ALWAYS
#define ORBIT_FULL_WAIT_A_SECOND ORRERY_ORBIT_FULL_WAIT_A_SECOND
#define ORBIT_FULL_WAIT ORRERY_ORBIT_FULL_WAIT
#define ORBIT_FULL_FAIL ORRERY_ORBIT_FULL_FAIL
#define ORBIT_FULL_CANCEL_OLDEST ORRERY_ORBIT_FULL_CANCEL_OLDEST
#define ORBIT_REAP_LIBRARY ORRERY_ORBIT_REAP_LIBRARY
#define ORBIT_REAP_PROGRAM ORRERY_ORBIT_REAP_PROGRAM
#define ORBIT_RESTART_WITHOUT_LIMIT ORRERY_ORBIT_RESTART_WITHOUT_LIMIT
#define ORBIT_OPTIONS_INIT ORRERY_ORBIT_OPTIONS_INIT
#define ORBIT_NO_RETURN_VALUE ORRERY_ORBIT_NO_RETURN_VALUE
#define ORBIT_CANCELLABLE ORRERY_ORBIT_CANCELLABLE
#define ORBIT_SKIP_SAME_ARGUMENT ORRERY_ORBIT_SKIP_SAME_ARGUMENT
#define ORBIT_SKIP_ANY ORRERY_ORBIT_SKIP_ANY
#define ORBIT_CANCEL_SAME_ARGUMENT ORRERY_ORBIT_CANCEL_SAME_ARGUMENT
#define ORBIT_CANCEL_ANY ORRERY_ORBIT_CANCEL_ANY
#define ORBIT_RECORD_DATA ORRERY_ORBIT_RECORD_DATA
#define ORBIT_RECORD_MODIFY ORRERY_ORBIT_RECORD_MODIFY
#define ORBIT_RECORD_OPERATION ORRERY_ORBIT_RECORD_OPERATION
#define ORBIT_MODE_AUTO ORRERY_AREA_MODE_AUTO
#define ORBIT_MODE_COPY ORRERY_AREA_MODE_COPY
#define ORBIT_MODE_COW ORRERY_AREA_MODE_COW
#define ORBIT_AREA_OPTIONS_INIT ORRERY_AREA_OPTIONS_INIT

#endif
