//! The orbit's life: wait for a call, bring the view up to date, run the task, answer, forget what the task wrote.

use core::any::Any;
use core::cell::Cell;
use core::ffi::c_void;
use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::sync::Arc;

use orrery_domain::{Channel, Moment, Partner, Side};
use orrery_memory::area::{DeltaRef, Mirror, View};
use orrery_sys::generation;

use crate::arguments::ARGUMENTS;
use crate::check::CheckLog;
use crate::control_block::{Claim, ControlBlock};
use crate::exception::call_foreign;
use crate::protocol::{ANSWER, Answer, Function, REQUEST, Request};
use crate::task::{self, Inside, Store, Task};
use crate::update_socket::UpdateSocket;
use crate::{check, crash, exception, exit, limit};

/// Exit statuses of an orbit that ends itself; the control block says more.
const GAVE_UP: i32 = 125;
pub(crate) const PANICKED: i32 = 101;

/// The entry function of an orbit.
pub(crate) enum Entry {
    /// Each call names its function.
    None,
    Function(Function),
    Closure(Box<dyn Fn(&mut Task<'_>) -> i64 + Send + Sync>),
}

/// What makes the private store.
pub(crate) enum Init {
    None,
    Closure(Box<dyn Fn() -> Box<dyn Any> + Send + Sync>),
    C(unsafe extern "C" fn() -> *mut c_void),
}

/// All that the orbit needs, made before the fork.
pub(crate) struct Program {
    pub(crate) name: String,
    pub(crate) entry: Entry,
    pub(crate) init: Init,
    pub(crate) channel: Arc<Channel>,
    pub(crate) control: Arc<ControlBlock>,
    pub(crate) update_socket: Arc<UpdateSocket>,
    pub(crate) mirror: Arc<Mirror>,
    pub(crate) check: Option<Arc<CheckLog>>,
}

/// Arguments, aligned for whatever a C task takes them for.
#[repr(C, align(64))]
struct Buffer {
    request: [u8; 64],
    arguments: [u8; ARGUMENTS],
}

impl Program {
    /// Runs in the orbit, until it is killed.
    pub(crate) fn run(&self) {
        // SAFETY: this is a fresh child of main, with one thread that owns nothing in any area.
        let view = match unsafe { View::attach(&self.mirror) } {
            Ok(view) => view,
            Err(error) => give_up(|| self.control.note_snapshot(&error.to_string())),
        };
        // SAFETY: main's end is main's; here only the domain's is used.
        let side = match unsafe { self.channel.domain() } {
            Ok(side) => side,
            Err(error) => give_up(|| self.control.note_queue(&error.to_string())),
        };
        let inside: &'static Inside = Box::leak(Box::new(Inside {
            generation: generation(),
            name: self.name.clone(),
            channel: Arc::clone(&self.channel),
            control: Arc::clone(&self.control),
            update_socket: Arc::clone(&self.update_socket),
            call: Cell::new(None),
        }));
        task::enter(inside);
        crash::install(&inside.control);
        exception::install(&inside.control);
        exit::install();
        let inherited = self.check.as_ref().and_then(|_| check::prepare());
        let store = self.guarded(|| match &self.init {
            Init::None => Store::C(core::ptr::null_mut()),
            Init::Closure(init) => Store::Rust(init()),
            Init::C(init) => {
                let null = core::ptr::null_mut();
                // SAFETY: the user's own function, which takes nothing and returns a pointer.
                let store = unsafe { call_foreign(*init as *const () as usize, null, null) };
                Store::C(core::ptr::with_exposed_provenance_mut(
                    usize::try_from(store.cast_unsigned()).unwrap_or(0),
                ))
            }
        });
        if let (Some(inherited), Some(log)) = (inherited, &self.check) {
            check::install(&inherited, &view, Box::leak(Box::new(Arc::clone(log))));
        }
        self.control.set_ready();
        side.gate().ring();
        self.serve(side, view, store, inside)
    }

    fn serve(&self, mut side: Side, mut view: View, mut store: Store, inside: &Inside) -> ! {
        let mut buffer = Buffer { request: [0; 64], arguments: [0; ARGUMENTS] };
        let mut timer = limit::Timer::default();
        let snapshot = |error: orrery_memory::area::Error| -> ! {
            give_up(|| self.control.note_snapshot(&error.to_string()))
        };
        let queue = |text: &str| -> ! { give_up(|| self.control.note_queue(text)) };
        loop {
            let heard = side.gate().heard();
            let mut message = [0; REQUEST + ARGUMENTS];
            let len = match side.peek(&mut message) {
                Ok(Some(len)) => len,
                Ok(None) => {
                    side.gate().wait(heard, None, Partner::Watched);
                    continue;
                }
                Err(error) => queue(&error.to_string()),
            };
            // SAFETY: main wrote the message in the queue, and sends functions only that exist.
            let Some(request) = (unsafe { Request::decode(&message[..len]) }) else {
                queue("a call that makes no sense");
            };
            let number = side.taken();
            let wanted = self.control.turn(number, Claim::Taken);
            if !wanted && self.control.claim(number) != Claim::Cancelled {
                queue("a claim that makes no sense");
            }
            // What a cancelled call or a predecessor's last one brought is the base for the calls behind it.
            if let Err(error) = view.apply(&DeltaRef::from_bits(request.delta)) {
                snapshot(error);
            }
            side.take();
            if !wanted {
                side.gate().ring();
                continue;
            }
            let arguments = &message[REQUEST..len];
            buffer.arguments[..arguments.len()].copy_from_slice(arguments);
            buffer.arguments[arguments.len()..].fill(0);
            inside.call.set(Some(request.call));
            if request.limit > 0 {
                self.control.set_started(Moment::now().0);
                timer.arm(request.limit);
            }
            let value = self.guarded(|| {
                check::begin();
                self.task(&request, &mut buffer.arguments[..arguments.len()], &mut store)
            });
            timer.disarm();
            inside.call.set(None);
            let answer = Answer { call: request.call, value }.encode();
            if let Err(error) = side.send(&[&answer]) {
                queue(&error.to_string());
            }
            side.gate().ring();
            if let Err(error) = view.refresh() {
                snapshot(error);
            }
        }
    }

    fn task(&self, request: &Request, arguments: &mut [u8], store: &mut Store) -> i64 {
        let function = match (&request.function, &self.entry) {
            (Some(function), _) => *function,
            (None, Entry::Function(function)) => *function,
            (None, Entry::Closure(closure)) => {
                return closure(&mut Task { call: request.call, arguments, store });
            }
            (None, Entry::None) => give_up(|| self.control.note_queue("a call without a function")),
        };
        match function {
            Function::Rust(function) => function(&mut Task { call: request.call, arguments, store }),
            // SAFETY: main checked that the address is code of the program; the caller of main's function vouched for
            // its type.
            Function::C(function) => unsafe {
                call_foreign(function as usize, arguments.as_mut_ptr().cast(), store.pointer())
            },
            Function::StoreFirst(function) => {
                // SAFETY: main checked that the address is code of the program; the caller of main's function
                // vouched for its type.
                unsafe { call_foreign(function as usize, store.pointer(), arguments.as_mut_ptr().cast()) }
            }
        }
    }

    /// Runs the user's code; a panic ends the orbit.
    fn guarded<R>(&self, work: impl FnOnce() -> R) -> R {
        let result = catch_unwind(AssertUnwindSafe(work));
        check::end();
        // A child that the task forked and let return is not the orbit, and must not go on as if it were.
        if !task::is_orbit_itself() {
            end(if result.is_ok() { 0 } else { PANICKED });
        }
        match result {
            Ok(result) => result,
            Err(panic) => {
                let text = panic
                    .downcast_ref::<&str>()
                    .copied()
                    .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
                    .unwrap_or("(no message)");
                self.control.note_panic(text);
                end(PANICKED)
            }
        }
    }
}

fn give_up(note: impl FnOnce()) -> ! {
    note();
    end(GAVE_UP)
}

fn end(status: i32) -> ! {
    // SAFETY: ends the process without running what main registered for its own end.
    unsafe { libc::_exit(status) }
}

const _: () = assert!(ANSWER <= ARGUMENTS && REQUEST <= 64);
