//! What zpoline does: `syscall` becomes `call *%rax`, which is as long, and rax holds the number of the call. So page zero
//! has to be mapped, with instructions that perform the call.
//!
//! The hook is the leanest that is possible: it performs the call and returns. Only the functions that are measured are
//! rewritten.

use std::io;
use std::ptr;

use anyhow::{Result, bail, ensure};

use crate::contender::Skipped;

const PAGE: usize = 4096;
/// Numbers that are led on.
const NUMBERS: usize = 512;
/// How far a function's code is looked through.
const LOOKED_AT: usize = 96;
/// Numbers of calls that no kernel has any more; a short jump there saves some of the way.
const UNUSED: usize = 214;
const NOP: u8 = 0x90;

/// Maps page zero, and rewrites these functions of the C library.
///
/// # Errors
/// [`Skipped`] where page zero cannot be mapped.
pub fn install(functions: &[*const u8]) -> Result<()> {
    let mut code = vec![NOP; NUMBERS];
    code[UNUSED..UNUSED + 2].copy_from_slice(&[0xeb, 127]);
    // Below the caller's red zone; the address to return to waits in r11's place on the stack.
    code.extend([
        0x48, 0x8d, 0x64, 0x24, 0x80, // lea -128(%rsp),%rsp
        0x0f, 0x05, // syscall
        0x48, 0x8d, 0xa4, 0x24, 0x80, 0, 0, 0,    // lea 128(%rsp),%rsp
        0xc3, // ret
    ]);
    // SAFETY: page zero is nobody's; where it is somebody's, the kernel refuses.
    unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let page = libc::mmap(ptr::null_mut(), PAGE, protection, flags, -1, 0);
        if page == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            bail!(Skipped(format!("page zero cannot be mapped (vm.mmap_min_addr): {error}")));
        }
        // Rust's own copy may take address zero for a mistake.
        let source = libc::iovec { iov_base: code.as_mut_ptr().cast(), iov_len: code.len() };
        let target = libc::iovec { iov_base: page, iov_len: code.len() };
        let copied = libc::process_vm_writev(libc::getpid(), &raw const source, 1, &raw const target, 1, 0);
        ensure!(usize::try_from(copied) == Ok(code.len()), "fill page zero: {}", io::Error::last_os_error());
        let result = libc::mprotect(page, PAGE, libc::PROT_READ | libc::PROT_EXEC);
        ensure!(result == 0, "make page zero executable: {}", io::Error::last_os_error());
        for function in functions {
            rewrite(*function)?;
        }
    }
    Ok(())
}

/// # Safety
/// `function` is code of the C library, and no other thread runs it.
unsafe fn rewrite(function: *const u8) -> Result<()> {
    // SAFETY: the C library's code goes on behind each of its functions that is measured; nobody runs this one now.
    unsafe {
        let bytes = std::slice::from_raw_parts(function, LOOKED_AT).to_vec();
        let calls: Vec<usize> = (2..LOOKED_AT - 1)
            .filter(|&at| bytes[at..at + 2] == [0x0f, 0x05])
            // Behind `mov $number,%eax` or `xor %eax,%eax`.
            .filter(|&at| bytes[at - 2..at] == [0x31, 0xc0] || (at >= 5 && bytes[at - 5] == 0xb8))
            .collect();
        ensure!(!calls.is_empty(), "found no system call in a function of the C library");
        let start = function.map_addr(|address| address & !(PAGE - 1)).cast_mut();
        let length = 2 * PAGE;
        let all = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        ensure!(libc::mprotect(start.cast(), length, all) == 0, "mprotect: {}", io::Error::last_os_error());
        for at in calls {
            let place = function.cast_mut().add(at);
            place.write_volatile(0xff);
            place.add(1).write_volatile(0xd0);
        }
        libc::mprotect(start.cast(), length, libc::PROT_READ | libc::PROT_EXEC);
    }
    Ok(())
}
