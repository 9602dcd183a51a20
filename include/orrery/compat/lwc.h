/*
 * Orrery's contexts and snapshots under the names of "Light-Weight Contexts: An OS Abstraction for Safety and Performance"
 * (Litton et al., OSDI 2016), sections 3.1 to 3.9, and of its Algorithms.
 *
 * Each name stands for one of orrery/context.h or orrery/rollback.h, which document it; names that the paper does not have
 * are formed like its own. New programs use those headers.
 */
#ifndef ORRERY_COMPAT_LWC_H
#define ORRERY_COMPAT_LWC_H

#include <orrery/context.h>
#include <orrery/rollback.h>

#define lw_snapshot_t orrery_rollback_snapshot_t
#define lw_snapshot orrery_rollback_snapshot
#define lw_resume orrery_rollback_resume
#define lw_keep orrery_rollback_exclude
#define lw_discard orrery_rollback_discard
#define lw_error orrery_last_error
#define lwCreate orrery_context_create
#define lwSwitch orrery_context_switch
#define lwSwitchBytes orrery_context_switch_bytes
#define lwReceived orrery_context_received
#define lwRestrict orrery_context_restrict
#define lwOverlay orrery_context_overlay
#define lwCalled orrery_context_trapped_call
#define lwCopyIn orrery_context_copy_in
#define lwCopyPath orrery_context_copy_path
#define lwCopyOut orrery_context_copy_out
#define lwGive orrery_context_install_fd
#define lwProceed orrery_context_proceed
#define lwSyscall orrery_context_syscall
#define lwKeepGood orrery_context_checkpoint
#define lwFork orrery_context_fork
#define lwClose orrery_context_close
#define lwc_spec orrery_context_spec
#define lwc_call orrery_context_call
#define LWC_VM ORRERY_CONTEXT_VM
#define LWC_FD ORRERY_CONTEXT_FD
#define LWC_SYSCALL ORRERY_CONTEXT_SYSCALL
#define LWC_CRED ORRERY_CONTEXT_CRED
#define LWC_COW ORRERY_CONTEXT_COW
#define LWC_SHARE ORRERY_CONTEXT_SHARE
#define LWC_UNMAP ORRERY_CONTEXT_UNMAP
#define LWC_MAY_ACCESS ORRERY_CONTEXT_MAY_ACCESS
#define LWC_MAY_OVERLAY ORRERY_CONTEXT_MAY_ACCESS
#define LWC_ALL ORRERY_CONTEXT_ALL
#define LWC_ROOT ORRERY_CONTEXT_ROOT
#define LWC_SHAREDSIGNALS ORRERY_CONTEXT_SHARED_SIGNALS
#define LWC_DUMPABLE ORRERY_CONTEXT_DUMPABLE
#define LWC_SYSTRAP ORRERY_CONTEXT_TRAP_SYSCALLS
#define LWC_ALONE ORRERY_CONTEXT_SINGLE_THREAD
#define LWC_ISOLATED ORRERY_CONTEXT_ISOLATED
#define LWC_NOT_ISOLATED ORRERY_CONTEXT_NOT_ISOLATED
#define LWC_ROOM ORRERY_CONTEXT_MESSAGE_MAX
#define LWC_OWN(type) ORRERY_CONTEXT_CALLERS(type)

#endif
