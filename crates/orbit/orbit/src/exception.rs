//! In the orbit: tasks in C and C++ are called through a frame at which C++ exceptions end.
//!
//! The frame's *personality routine* is asked by the unwinder, before anything is unwound, whether it has a handler for what
//! was thrown (Itanium C++ ABI, part II). For a C++ exception it notes type and `what()` and ends the process; all else, such
//! as a Rust panic, goes on.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::control_block::ControlBlock;
use crate::symbol::demangle_cpp;
use crate::{check, task};

/// The exit status of an orbit whose task threw.
const THREW: i32 = 101;

/// Where it is noted.
static CONTROL: AtomicPtr<ControlBlock> = AtomicPtr::new(core::ptr::null_mut());

/// Says where to note exceptions.
pub(crate) fn install(control: &'static ControlBlock) {
    CONTROL.store(core::ptr::from_ref(control).cast_mut(), Ordering::SeqCst);
}

unsafe extern "C-unwind" {
    /// Calls the function at an address with two words, and returns its word.
    ///
    /// # Safety
    /// There is a function that may be called so.
    #[link_name = "orrery_orbit_call_foreign"]
    pub(crate) fn call_foreign(function: usize, first: *mut c_void, second: *mut c_void) -> i64;
}

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .data.rel.ro,\"aw\",@progbits",
    ".p2align 3",
    "orrery_orbit_personality_reference:",
    ".quad {personality}",
    ".popsection",
    ".pushsection .text.orrery_orbit_call_foreign,\"ax\",@progbits",
    ".globl orrery_orbit_call_foreign",
    ".hidden orrery_orbit_call_foreign",
    ".type orrery_orbit_call_foreign,@function",
    "orrery_orbit_call_foreign:",
    ".cfi_startproc",
    // Indirect, relative to the program counter, four bytes.
    ".cfi_personality 0x9b, orrery_orbit_personality_reference",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "mov rax, rdi",
    "mov rdi, rsi",
    "mov rsi, rdx",
    "call rax",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size orrery_orbit_call_foreign, . - orrery_orbit_call_foreign",
    ".popsection",
    personality = sym personality,
);

const SEARCH_PHASE: c_int = 1;
const CONTINUE_UNWIND: c_int = 8;
/// What the class of a C++ exception ends with, whoever's runtime threw it: "C++\0", or "C++\x01" for one thrown again.
const CPP: u64 = 0x0043_2b2b;

/// How far the thrown type is before the unwinder's part of a C++ exception, whose object follows that part.
const TYPE_BEFORE: usize = 80;
const OBJECT_AFTER: usize = 32;

unsafe extern "C" fn personality(
    _version: c_int,
    actions: c_int,
    class: u64,
    exception: *mut c_void,
    _context: *mut c_void,
) -> c_int {
    let is_cpp = (class >> 8) & 0x00ff_ffff == CPP;
    if !is_cpp || actions & SEARCH_PHASE == 0 || !task::is_orbit_itself() {
        return CONTINUE_UNWIND;
    }
    check::end();
    let control = CONTROL.load(Ordering::SeqCst);
    if !control.is_null() {
        // SAFETY: the runtime that threw says by the class that this is an exception of its layout; the control block was
        // given to `install` for good.
        unsafe {
            let (kind, what) = describe(exception, class & 0xff == 1);
            (*control).note_exception(&kind, what.as_deref());
        }
    }
    // SAFETY: ends the process without running what main registered for its own end.
    unsafe { libc::_exit(THREW) }
}

/// The start of every `std::type_info`.
#[repr(C)]
struct TypeInfo {
    functions: *const *const c_void,
    name: *const c_char,
}

/// Returns the type and, of a `std::exception`, what it says.
///
/// # Safety
/// `exception` is the unwinder's part of a C++ exception; `dependent` says that it was thrown again by
/// `std::rethrow_exception`, and refers to its object.
unsafe fn describe(exception: *mut c_void, dependent: bool) -> (String, Option<String>) {
    // SAFETY: the layout is that of the C++ ABI, which GNU's and LLVM's runtimes share: the type is at a fixed distance in
    // front, except in a dependent exception, which begins with a pointer to the object behind its primary exception.
    unsafe {
        let (object, exception) = if dependent {
            let object = exception.byte_sub(TYPE_BEFORE).cast::<*mut c_void>().read();
            (object, object.byte_sub(OBJECT_AFTER))
        } else {
            (exception.byte_add(OBJECT_AFTER), exception)
        };
        let thrown = exception.byte_sub(TYPE_BEFORE).cast::<*const TypeInfo>().read();
        if thrown.is_null() || (*thrown).name.is_null() {
            return ("of an unknown type".to_owned(), None);
        }
        // GNU's runtime marks names that are unique to a program part.
        let name = (*thrown).name;
        let mangled = CStr::from_ptr(if name.cast::<u8>().read() == b'*' { name.add(1) } else { name });
        let kind = demangle_cpp(mangled).unwrap_or_else(|| mangled.to_string_lossy().into_owned());
        let base = libc::dlsym(libc::RTLD_DEFAULT, c"_ZTISt9exception".as_ptr()).cast::<TypeInfo>();
        if base.is_null() {
            return (kind, None);
        }
        // The fifth virtual function of a type_info: whether a handler for it catches `thrown`; adjusts the pointer.
        type Catches = unsafe extern "C" fn(*const TypeInfo, *const TypeInfo, *mut *mut c_void, u32) -> bool;
        let catches = core::mem::transmute::<*const c_void, Catches>((*base).functions.add(4).read());
        let mut adjusted = object;
        if !catches(base, thrown, &raw mut adjusted, 1) {
            return (kind, None);
        }
        // The third virtual function of a std::exception, behind two destructors.
        type What = unsafe extern "C" fn(*mut c_void) -> *const c_char;
        let functions = adjusted.cast::<*const *const c_void>().read();
        let what = core::mem::transmute::<*const c_void, What>(functions.add(2).read())(adjusted);
        let text = (!what.is_null()).then(|| CStr::from_ptr(what).to_string_lossy().into_owned());
        (kind, text)
    }
}

#[cfg(not(target_arch = "x86_64"))]
compile_error!("orrery-orbit: exception.rs does not know how this architecture calls functions");
