//! Libraries whose accesses are relative to GS: the base is always the distance of the instance that the thread is in.
//!
//! The other test programs of this crate run with such libraries, too.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::cell::Cell;
use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{Number, alone, function};
use orrery_orc_instance::{Attached, Entered, Error, Instance, Library};
use orrery_sys::gs_base::GsBase;
use orrery_testing::cls::{self, Build};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libraries").join(name)
}

fn built(name: &str, build: Build) -> Option<PathBuf> {
    cls::library(name, &[source("base.c")], &["-O2"], build)
}

/// The library, with its functions.
struct Base {
    library: Library,
    at: extern "C" fn() -> *mut i32,
    are_one: Number,
    get: Number,
    set: extern "C" fn(i32),
    set_callback: extern "C" fn(extern "C" fn(i32) -> i32),
    call_back: extern "C" fn(i32) -> i32,
}

impl Base {
    fn load(path: &Path) -> Self {
        let library = Library::load(path).unwrap();
        // SAFETY: the functions have these types in the library's source.
        unsafe {
            Self {
                at: function(&library, c"where"),
                are_one: function(&library, c"are_one"),
                get: function(&library, c"get"),
                set: function(&library, c"set"),
                set_callback: function(&library, c"set_callback"),
                call_back: function(&library, c"call_back"),
                library,
            }
        }
    }

    fn gs() -> Option<Self> {
        let found = Self::load(&built("base-gs", Build::Gs)?);
        assert!(found.library.uses_gs());
        Some(found)
    }

    fn number(&self, name: &CStr) -> Number {
        // SAFETY: the tests name functions of this type.
        unsafe { function(&self.library, name) }
    }

    /// Returns the distance that the calling thread's word has.
    fn word(&self) -> usize {
        let own = self.library.symbol(c"number").unwrap().as_ptr();
        (self.at)().addr().wrapping_sub(own.addr())
    }

    /// Returns it, after a look at whether all ways lead there.
    fn checked(&self) -> usize {
        let word = self.word();
        assert_eq!(GsBase::detect().get(), word, "the base is not the word");
        assert_eq!((self.are_one)(), 1);
        word
    }
}

#[test]
fn the_base_is_the_distance() {
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let (mut one, two) = (base.library.create().unwrap(), base.library.create().unwrap());
    assert_eq!(base.checked(), 0);
    let first = one.enter().unwrap().run(|| base.checked());
    assert_eq!(base.checked(), 0);
    // SAFETY: this thread leaves the instance.
    unsafe { two.enter_unguarded() }.unwrap();
    let second = base.checked();
    assert_eq!(one.enter().unwrap().run(|| base.checked()), first);
    assert_eq!(base.checked(), second);
    two.leave().unwrap();
    assert_eq!(base.checked(), 0);
    // arch_prctl(2) and ptrace(2) refuse what is no address of a program.
    for distance in [first, second] {
        assert!(distance != 0 && distance < 1 << 47, "{distance:#x}");
    }
    assert_ne!(first, second);
}

/// What a thread does, in any order: the base is the word after each step, and each instance has what was stored there.
#[test]
fn the_base_is_the_distance_whatever_a_thread_does() {
    const INSTANCES: usize = 4;
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let cases = std::env::var("ORRERY_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(200);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() });
    let steps = prop::collection::vec((0..7_u32, 0..INSTANCES, any::<i32>()), 1..60);
    runner
        .run(&steps, |steps| {
            // Before what borrows them, so that they are dropped after it.
            let mut instances: Vec<Instance> =
                (0..INSTANCES).map(|_| base.library.create().unwrap()).collect();
            let mut stored = [1_i32; INSTANCES];
            {
                let instances = &instances;
                let mut within: Vec<usize> = Vec::new();
                let mut attached: Option<(usize, Attached<'_>)> = None;
                for (step, which, value) in steps {
                    let instance = &instances[which];
                    match step {
                        // SAFETY: this thread leaves what it entered, below.
                        0 | 1 => match unsafe { instance.enter_unguarded() } {
                            Ok(()) => within.push(which),
                            Err(_) => prop_assert!(within.contains(&which)),
                        },
                        2 => match instance.leave() {
                            Ok(()) => prop_assert_eq!(within.pop(), Some(which)),
                            Err(_) => prop_assert_ne!(within.last(), Some(&which)),
                        },
                        // SAFETY: this thread alone uses the library.
                        3 if attached.is_none() => match unsafe { instance.attach() } {
                            Ok(guard) => attached = Some((which, guard)),
                            Err(_) => prop_assert!(!within.is_empty()),
                        },
                        // Also within others: that is the end of the list.
                        4 => drop(attached.take()),
                        5 => {
                            let mut other = base.library.create().unwrap();
                            prop_assert_ne!(other.enter().unwrap().run(|| base.checked()), 0);
                            other.reset().unwrap();
                            let snapshot = other.snapshot().unwrap();
                            other.restore(&snapshot).unwrap();
                        }
                        _ => {
                            let at = within.last().copied().or(attached.as_ref().map(|(which, _)| *which));
                            if let Some(at) = at {
                                (base.set)(value);
                                stored[at] = value;
                            }
                        }
                    }
                    let at = within.last().copied().or(attached.as_ref().map(|(which, _)| *which));
                    let own = base.library.symbol(c"number").unwrap().as_ptr().addr();
                    let wanted = at.map_or(0, |at| {
                        instances[at].variable(c"number").unwrap().addr().get().wrapping_sub(own)
                    });
                    prop_assert_eq!(GsBase::detect().get(), wanted);
                    prop_assert_eq!(base.word(), wanted);
                    if let Some(at) = at {
                        prop_assert_eq!((base.get)(), stored[at]);
                    }
                }
                while let Some(which) = within.pop() {
                    instances[which].leave().unwrap();
                }
                drop(attached);
            }
            prop_assert_eq!(base.checked(), 0);
            for (instance, stored) in instances.iter_mut().zip(stored) {
                prop_assert_eq!(instance.enter().unwrap().run(|| (base.get)()), stored);
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn guards_that_end_in_any_order_leave_the_base_right() {
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let mut instances: Vec<Instance> = (0..3).map(|_| base.library.create().unwrap()).collect();
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut guards: Vec<Option<Entered<'_>>> =
            instances.iter_mut().map(|instance| Some(instance.enter().unwrap())).collect();
        for which in order {
            guards[which] = None;
            base.checked();
        }
        assert_eq!(base.checked(), 0);
    }
}

#[test]
fn one_library_of_a_process_uses_gs() {
    let _alone = alone();
    let (Some(first), Some(second), Some(word)) =
        (built("base-gs", Build::Gs), built("base-gs-other", Build::Gs), built("base", Build::Word))
    else {
        return;
    };
    let one = Base::load(&first);
    let error = Library::load(&second).unwrap_err();
    assert!(matches!(error, Error::BaseTaken { .. }), "{error}");
    assert!(error.to_string().contains("another library of this process does"), "{error}");
    // The same one, and one that does not use it.
    assert!(Library::load(&first).unwrap().uses_gs());
    assert!(!Library::load(&word).unwrap().uses_gs());
    drop(one);
    assert!(Library::load(&second).unwrap().uses_gs());
}

#[test]
fn a_library_is_refused_where_the_base_is_used() {
    let _alone = alone();
    let Some(path) = built("base-gs", Build::Gs) else { return };
    let way = GsBase::detect();
    // SAFETY: no library that uses GS is loaded.
    unsafe { way.set(0x1000) };
    let error = Library::load(&path).unwrap_err();
    assert_eq!(way.get(), 0x1000);
    // SAFETY: none is loaded still.
    unsafe { way.set(0) };
    assert!(matches!(error, Error::BaseUsed { base: 0x1000, .. }), "{error}");
    assert!(error.to_string().contains("whose base is 0x1000 in this thread"), "{error}");
    Base::load(&path).checked();
}

thread_local! {
    /// The library that a callback of the running test uses.
    static OTHER: Cell<*const Base> = const { Cell::new(std::ptr::null()) };
}

/// Runs `action` while callbacks find `base`.
fn with_other<T>(base: &Base, action: impl FnOnce() -> T) -> T {
    OTHER.set(base);
    let result = action();
    OTHER.set(std::ptr::null());
    result
}

fn other<'a>() -> &'a Base {
    // SAFETY: callbacks run within `with_other`, whose caller has the library.
    unsafe { OTHER.get().as_ref() }.unwrap()
}

/// Libraries that use the word are entered within, and call back.
#[test]
fn libraries_of_both_kinds_call_each_other() {
    let _alone = alone();
    let (Some(gs), Some(path)) = (Base::gs(), built("base", Build::Word)) else { return };
    let word = Base::load(&path);
    extern "C" fn into_word(n: i32) -> i32 {
        let word = other();
        let mut instance = word.library.create().unwrap();
        instance.enter().unwrap().run(|| {
            (word.set)(n);
            assert_eq!((word.are_one)(), 1);
            (word.get)()
        })
    }
    let mut outer = word.library.create().unwrap();
    let mut inner = gs.library.create().unwrap();
    let guard = outer.enter().unwrap();
    (word.set)(70);
    inner.enter().unwrap().run(|| {
        (gs.set_callback)(into_word);
        assert_eq!(with_other(&word, || (gs.call_back)(5)), 8);
        gs.checked();
    });
    assert_eq!(((word.get)(), (word.are_one)()), (70, 1));
    drop(guard);
    assert_eq!(gs.checked(), 0);
}

#[test]
fn signals_and_jumps_find_the_base() {
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let raise = base.number(c"raise_signal");
    let mut one = base.library.create().unwrap();
    for round in 1..4 {
        assert_eq!(one.enter().unwrap().run(|| raise()), round);
    }
    assert_eq!(raise(), 1);
    extern "C" fn jump(_: i32) -> i32 {
        let base = other();
        // SAFETY: the function has this type in the library's source.
        let jump: extern "C-unwind" fn() = unsafe { function(&base.library, c"jump") };
        jump();
        0
    }
    // SAFETY: the function has this type in the library's source.
    let jumped: extern "C" fn(i32) -> i32 = unsafe { function(&base.library, c"jumped") };
    one.enter().unwrap().run(|| {
        (base.set_callback)(jump);
        (base.set)(42);
        assert_eq!(with_other(&base, || jumped(1)), 42);
        base.checked();
    });
    assert_eq!(base.checked(), 0);
}

/// The kernel gives a thread the base of the one that makes it. Entering and attaching do not rely on it.
#[test]
fn a_thread_made_within_an_instance_enters_others() {
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let (one, mut two) = (base.library.create().unwrap(), base.library.create().unwrap());
    // SAFETY: this thread leaves the instance.
    unsafe { one.enter_unguarded() }.unwrap();
    (base.set)(10);
    let outer = base.checked();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let inner = two.enter().unwrap().run(|| {
                (base.set)(20);
                base.checked()
            });
            assert_ne!(inner, outer);
            assert_eq!(base.checked(), 0);
            // SAFETY: the other thread waits.
            let attached = unsafe { two.attach() }.unwrap();
            assert_eq!(base.checked(), inner);
            drop(attached);
            assert_eq!(base.checked(), 0);
        });
    });
    assert_eq!(((base.get)(), base.checked()), (13, outer));
    one.leave().unwrap();
    assert_eq!(two.enter().unwrap().run(|| (base.get)()), 26);
}

#[test]
fn a_forked_child_is_in_the_instance() {
    let _alone = alone();
    let Some(base) = Base::gs() else { return };
    let mut one = base.library.create().unwrap();
    let guard = one.enter().unwrap();
    (base.set)(5);
    // SAFETY: the child calls the library's functions and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let good = GsBase::detect().get() == base.word() && (base.are_one)() == 1 && (base.get)() == 8;
        // SAFETY: it ends the child.
        unsafe { libc::_exit(i32::from(!good)) };
    }
    let mut status = -1;
    // SAFETY: the child is this process's, and `status` outlives the call.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!((status, (base.get)()), (0, 5));
    drop(guard);
    base.checked();
}

/// Units that were built either way make one library, which uses GS.
#[test]
fn units_of_both_kinds_are_one_library() {
    let _alone = alone();
    let Some(pass) = cls::pass() else { return };
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let text = "extern int number; int by_word(void) { return number; } void to_word(int n) { number = n; }";
    std::fs::write(here.join("other.c"), text).unwrap();
    let compile = |base: &str, arguments: &[&str]| {
        let mut command = Command::new(pass.join("bin/orrery-cc"));
        command.current_dir(here).env("ORRERY_CLS_BASE", base).args(["-O2", "-fPIC"]).args(arguments);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let first = source("base.c");
    for (one, other, name) in [("gs", "word", "one.so"), ("word", "gs", "two.so")] {
        compile(one, &["-c", first.to_str().unwrap(), "-o", "base.o"]);
        compile(other, &["-c", "other.c", "-o", "other.o"]);
        compile("word", &["-shared", "base.o", "other.o", "-o", name]);
        let base = Base::load(&here.join(name));
        assert!(base.library.uses_gs());
        let by_word = base.number(c"by_word");
        // SAFETY: the function has this type in the source.
        let to_word: extern "C" fn(i32) = unsafe { function(&base.library, c"to_word") };
        let mut instances = [base.library.create().unwrap(), base.library.create().unwrap()];
        for (instance, n) in instances.iter_mut().zip([10, 20]) {
            instance.enter().unwrap().run(|| (base.set)(n));
        }
        for (instance, n) in instances.iter_mut().zip([10, 20]) {
            instance.enter().unwrap().run(|| {
                assert_eq!((by_word(), (base.get)()), (n, n));
                to_word(n + 1);
                assert_eq!((base.get)(), n + 1);
                base.checked();
            });
        }
        assert_eq!(by_word(), 1);
    }
}

/// Where the kernel does not allow the instructions.
#[test]
fn all_holds_without_the_instructions() {
    let without = ["all_holds_without_the_instructions"];
    common::repeat_relative_to_gs(&without, &[("ORRERY_INSTANCE_FSGSBASE", "off"), ("ORRERY_CASES", "30")]);
}
