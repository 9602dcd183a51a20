//! The assembly, with the functions and the data that it refers to.
//!
//! What follows a `syscall` of the program must find the flags as they were. So code that returns to the program uses `lea` and
//! `mov` for arithmetic, and `jrcxz` to branch.

use core::arch::global_asm;

use super::{sigsys, stub_calls};
use crate::config::{Config, Loading, NOT_LOADED};
use crate::executive::abi::signal_frame::{Context, Progress, Registers};
use crate::executive::abi::state::ORRERY_CONFIG;
use crate::executive::abi::thread_counters;
use crate::executive::abi::trampoline::{RETURN_ADDRESSES, STUB_FRAME_MARK, TRAMPOLINES};
use crate::executive::abi::unwind_step::{kind, number};
use crate::executive::memory::stub_pages;
use crate::executive::process::{boot, clone};
use crate::executive::signals::{handlers, held_sigsys, sigmask};
use crate::nr::CALLS;
use crate::shared_page::{BUCKETS, Calls, FIRST_BUCKET, SharedPage};

global_asm!(
    include_str!("assembly/unwind_steps.s"),
    include_str!("assembly/trampolines.s"),
    include_str!("assembly/boot.s"),
    include_str!("assembly/sigsys.s"),
    include_str!("assembly/clone.s"),
    include_str!("assembly/perform.s"),
    include_str!("assembly/counted_calls.s"),
    include_str!("assembly/stub_calls.s"),
    include_str!("assembly/handler_thunks.s"),
    include_str!("assembly/upcalls.s"),
    include_str!("assembly/end.s"),
    trampolines = const TRAMPOLINES,
    return_addresses = sym RETURN_ADDRESSES,
    config = sym ORRERY_CONFIG,
    code = const core::mem::offset_of!(Config, code),
    handlers_code = const core::mem::offset_of!(Config, handlers),
    handlers_length = const core::mem::offset_of!(Config, handlers_length),
    code_length = const core::mem::offset_of!(Config, code_length),
    action = const core::mem::offset_of!(Config, action),
    arming_forbidden = const core::mem::offset_of!(Config, arming_forbidden),
    unarmed = const core::mem::offset_of!(SharedPage, unarmed),
    calls = const core::mem::offset_of!(SharedPage, calls),
    tsc_disabled = const core::mem::offset_of!(Config, tsc_disabled),
    thread_counters_enabled = const core::mem::offset_of!(Config, thread_counters_enabled),
    owners = sym thread_counters::TABLE,
    other = const CALLS,
    first_bucket = const FIRST_BUCKET,
    last_bucket = const BUCKETS - 1,
    vfork_child = sym clone::vfork_child,
    vfork_parent = sym clone::vfork_parent,
    on_sigsys = sym sigsys::on_sigsys,
    stub_call = sym stub_calls::stub_call,
    mark = const STUB_FRAME_MARK,
    thunks = const handlers::THUNKS,
    handlers = sym handlers::HANDLERS,
    interrupted = const 8 + core::mem::offset_of!(Context, registers) + core::mem::offset_of!(Registers, rip),
    shown = const 8 + core::mem::offset_of!(Context, registers) + core::mem::offset_of!(Registers, mark),
    lowest_stub = sym stub_pages::LOWEST_STUB,
    highest_stub = sym stub_pages::HIGHEST_STUB,
    room = const handlers::ROOM,
    info = const 8 + size_of::<Context>(),
    present = sym handlers::present,
    tell = sym handlers::tell,
    journal = const core::mem::offset_of!(Config, journal),
    sigsys_blocked = sym held_sigsys::COUNT,
    show_sigsys = sym sigmask::show_sigsys,
    kinds = const kind::FIRST,
    saved = const core::mem::offset_of!(Context, registers),
    nothing = const kind::NOTHING,
    in_stub_call = const kind::STUB_CALL,
    in_stub_call_xmm = const kind::STUB_CALL_XMM,
    performs = const kind::PERFORMS,
    performed = const kind::PERFORMED,
    begins = const kind::BEGINS,
    progress = const core::mem::offset_of!(Context, registers)
        + core::mem::offset_of!(Registers, progress)
        + core::mem::offset_of!(Progress, done),
    entered = const kind::ENTERED,
    entered_further = const kind::ENTERED_FURTHER,
    at_rdi = const kind::AT_RDI,
    at_rcx = const kind::AT_RCX,
    loaded = const kind::LOADED,
    frame = const kind::FRAME,
    frame_at_rdi = const kind::FRAME_AT_RDI,
    compatible = const kind::COMPATIBLE,
    end = const kind::END,
    r11 = const number::R11,
    restoring_done = const number::RESTORING_DONE,
    restoring_unmade = const number::RESTORING_UNMADE,
    done = const number::DONE,
    done_pushed = const number::DONE_PUSHED,
    stub_filter = sym stub_calls::stub_filter,
    boot = sym boot::boot,
    data = const core::mem::offset_of!(Loading, data),
    data_length = const core::mem::offset_of!(Loading, data_length),
    bytes = const core::mem::offset_of!(Loading, bytes),
    table = const core::mem::offset_of!(Loading, table),
    table_bytes = const core::mem::offset_of!(Loading, table_bytes),
    page = const core::mem::offset_of!(Loading, page),
    boot_checked = const core::mem::offset_of!(Loading, checked),
    boot_options = const core::mem::offset_of!(Loading, options),
    boot_stack = const core::mem::offset_of!(Loading, stack),
    loading = const size_of::<Loading>(),
    not_loaded = const NOT_LOADED,
);

/// Rows are found by shifting.
const _: () = assert!(size_of::<Calls>() == 1 << 8 && CALLS == 512);
