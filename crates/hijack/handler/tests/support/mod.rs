//! Runs a handler's code as the executive does, in this process.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::AtomicU64;

use orrery_compiled_handler::Handler;
use orrery_hijack_image::handler::{COUNTERS, Context, FUEL, MEMORY, trap};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Code that can be executed.
pub(crate) struct Loaded {
    code: *mut c_void,
    length: usize,
    handler: Handler,
    pub(crate) memory: Vec<u8>,
    pub(crate) context: Context,
    pub(crate) counters: Box<[AtomicU64; COUNTERS]>,
}

/// As the executive's functions, for a handler that is tested alone: what would be copied is nowhere.
extern "C" fn nothing(context: &mut Context, _: i32, at: i32, to: i32, length: i32) -> i32 {
    let _ = (at, to, length);
    context.delay += 1;
    -14
}

impl Loaded {
    pub(crate) fn new(handler: Handler) -> Self {
        let length = handler.code.len().next_multiple_of(4096);
        // SAFETY: a new mapping, filled before it becomes code.
        let code = unsafe {
            let code = mmap_anonymous(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
            .unwrap();
            ptr::copy_nonoverlapping(handler.code.as_ptr(), code.cast(), handler.code.len());
            mprotect(code, length, MprotectFlags::READ | MprotectFlags::EXEC).unwrap();
            code
        };
        let mut memory = vec![0; MEMORY];
        memory[..handler.data.len()].copy_from_slice(&handler.data);
        let context = Context {
            memory: 0,
            dirty: 0,
            fuel: 0,
            stack: 0,
            trap: 0,
            constants: 0,
            given: [0; 6],
            arguments: [0; 6],
            result: 0,
            delay: 0,
            globals: handler.globals,
            functions: [(nothing as extern "C" fn(&mut Context, i32, i32, i32, i32) -> i32) as usize as u64;
                3],
            host: 0,
            counters: 0,
        };
        let counters = Box::new([const { AtomicU64::new(0) }; COUNTERS]);
        Self { code, length, handler, memory, context, counters }
    }

    /// Decides about a call; the verdict, or why there is none.
    pub(crate) fn decide(&mut self, number: i32, arguments: [u64; 6]) -> Result<i32, u64> {
        let context = &mut self.context;
        context.memory = self.memory.as_mut_ptr() as u64;
        context.counters = self.counters.as_ptr() as u64;
        context.constants = self.handler.constants.as_ptr() as u64;
        (context.fuel, context.stack, context.trap, context.dirty) = (FUEL, self.handler.stack, 0, 0);
        (context.given, context.arguments, context.result) = (arguments, arguments, 0);
        context.globals = self.handler.globals;
        // SAFETY: the entry of the code that was compiled for this signature.
        let verdict = unsafe {
            let decide: extern "C" fn(*mut Context, i32) -> i32 =
                std::mem::transmute(self.code.cast::<u8>().add(self.handler.entry as usize));
            decide(context, number)
        };
        match context.trap {
            0 => Ok(verdict),
            why => {
                assert!((trap::UNREACHABLE..=trap::VERDICT).contains(&why), "{why}");
                Err(why)
            }
        }
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: mapped by this, and nobody runs it any more.
        let _unmapped = unsafe { munmap(self.code, self.length) };
    }
}
