//! What instances of a library do, and do not do to each other.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

use common::{Number, built, function};
use orrery_orc_instance::{Error, Instance, Library, Options};

fn state() -> Option<Library> {
    Some(Library::load(built("state.c")?).unwrap())
}

fn number(library: &Library, name: &CStr) -> Number {
    // SAFETY: the tests name functions of this type.
    unsafe { function(library, name) }
}

fn call(instance: &mut Instance, function: Number) -> i32 {
    instance.enter().unwrap().run(|| function())
}

#[test]
fn state_is_apart() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let (mut one, mut two) = (library.create().unwrap(), library.create().unwrap());
    for round in 0..10 {
        assert_eq!(call(&mut one, next), 2 + round);
        assert_eq!(call(&mut two, next), 2 + round);
    }
    // SAFETY: the functions have these types in the library's source.
    let (get, set): (extern "C" fn(i32) -> i32, extern "C" fn(i32, i32)) =
        unsafe { (function(&library, c"get"), function(&library, c"set")) };
    one.enter().unwrap().run(|| set(99, 7));
    assert_eq!(two.enter().unwrap().run(|| get(99)), 0);
    assert_eq!(one.enter().unwrap().run(|| (get(0), get(99))), (1, 7));
    // SAFETY: the function has this type in the library's source.
    let distance: extern "C" fn() -> i64 = unsafe { function(&library, c"past_distance") };
    assert_eq!(one.enter().unwrap().run(|| distance()), 100);
    assert!(library.relocations() >= 2 && library.state_len() > 5400, "{library:?}");
}

#[test]
fn variables_have_addresses_per_instance() {
    let Some(library) = state() else { return };
    let (mut one, two) = (library.create().unwrap(), library.create().unwrap());
    call(&mut one, number(&library, c"next"));
    let read = |instance: &Instance, name| {
        let variable = instance.variable(name).unwrap().cast::<i32>();
        // SAFETY: the variable has the type `int` in the library's source, and no thread is in the instance.
        (variable, unsafe { variable.read() })
    };
    assert_eq!(read(&one, c"counter").1, 2);
    assert_eq!(read(&two, c"counter").1, 1);
    assert_eq!(read(&one, c"everybody").0, read(&two, c"everybody").0);
    assert!(read(&one, c"everybody").1 > 0);
    let error = one.variable(c"nothing").unwrap_err();
    assert_eq!(error.to_string(), "cannot find symbol nothing: the library has none of this name");
}

#[test]
fn constructors_run_in_each_instance() {
    let Some(library) = state() else { return };
    let times = number(&library, c"times_constructed");
    assert_eq!(times(), 1);
    let mut one = library.create().unwrap();
    assert_eq!(call(&mut one, times), 1);
    one.reset().unwrap();
    assert_eq!(call(&mut one, times), 1);
}

#[test]
fn a_reset_instance_is_as_at_first() {
    let Some(library) = state() else { return };
    // SAFETY: the function has this type in the library's source.
    let append: extern "C" fn(*const c_char) -> *const c_char = unsafe { function(&library, c"append") };
    let next = number(&library, c"next");
    let mut one = library.create().unwrap();
    for _ in 0..3 {
        assert_eq!(call(&mut one, next), 2);
        let text = one.enter().unwrap().run(|| append(c"some text".as_ptr()));
        // SAFETY: it is a C string of the instance.
        assert_eq!(unsafe { CStr::from_ptr(text) }, c"some text");
        one.reset().unwrap();
    }
}

#[test]
fn thread_locals_are_one_per_thread_and_instance() {
    let Some(library) = state() else { return };
    let next_local = number(&library, c"next_local");
    let (mut one, mut two) = (library.create().unwrap(), library.create().unwrap());
    assert_eq!((call(&mut one, next_local), call(&mut one, next_local)), (5, 6));
    assert_eq!(call(&mut two, next_local), 5);
    let mut one = std::thread::spawn(move || {
        assert_eq!(call(&mut one, next_local), 5);
        one
    })
    .join()
    .unwrap();
    assert_eq!(call(&mut one, next_local), 7);
    // Through a thread-local pointer to state, all threads wrote to that of the instance.
    // SAFETY: the function has this type in the library's source.
    let get: extern "C" fn(i32) -> i32 = unsafe { function(&library, c"get") };
    assert_eq!((one.enter().unwrap().run(|| get(1)), two.enter().unwrap().run(|| get(1))), (6, 3));
    assert_eq!(next_local(), 5);
}

/// Keys of all instances are more than a process has, and their destructors run in the instance, while the thread's variables are there.
#[test]
fn keys_of_thread_specific_data_are_of_each_instance() {
    let Some(library) = state() else { return };
    let get = |name| number(&library, name);
    let (make, set, sum) = (get(c"make_keys"), get(c"set_values"), get(c"sum_values"));
    let (next, ends, thread) = (get(c"next"), get(c"sum_of_ends"), get(c"run_thread_with_values"));
    let mut instances: Vec<Instance> = (0..300).map(|_| library.create().unwrap()).collect();
    for (at, instance) in instances.iter_mut().enumerate() {
        assert_eq!(call(instance, make), 0);
        assert_eq!(call(instance, sum), 8000);
        for _ in 0..at {
            call(instance, next);
        }
        assert_eq!(call(instance, set), 0);
    }
    // The counter of each is one more than it was called, and values are that and 0 to 7 more.
    let expected = |at: usize| i32::try_from(8 * (at + 1) + 28).unwrap();
    for (at, instance) in instances.iter_mut().enumerate() {
        assert_eq!(call(instance, sum), expected(at));
        assert_eq!(call(instance, ends), 0);
    }
    // A thread of the instance: its destructors find 6, which it has in place of 5.
    let first = &mut instances[3];
    assert_eq!(call(first, thread), expected(3) + 8 * 600);
    assert_eq!(call(first, sum), expected(3));
    // A thread of the program that was in two instances.
    let mut two = [instances.pop().unwrap(), instances.pop().unwrap()];
    let two = std::thread::spawn(move || {
        for instance in &mut two {
            assert_eq!((call(instance, sum), call(instance, set)), (8000, 0));
        }
        two
    });
    for (mut instance, at) in two.join().unwrap().into_iter().zip([299, 298]) {
        assert_eq!(call(&mut instance, ends), expected(at) + 8 * 500);
        assert_eq!(call(&mut instance, sum), expected(at));
        instance.destroy().unwrap();
    }
    // Destructors of keys that the process has find the thread's variables, and the instance.
    assert_eq!(call(&mut instances[4], get(c"run_thread_with_process_key")), 6005);
    // Deleted keys have no values, and those that are made in their places none of before.
    assert_eq!(call(&mut instances[5], get(c"delete_keys")), 8);
    assert_eq!((call(&mut instances[5], make), call(&mut instances[5], sum)), (0, 8000));
    assert_eq!(call(&mut instances[5], get(c"most_keys")), 1024 - 8);
    assert_eq!(call(&mut instances[6], sum), expected(6));
    // A copy has keys, and no values of any thread.
    let snapshot = instances[7].snapshot().unwrap();
    // SAFETY: the library's pointers are whole words.
    let mut copy = unsafe { snapshot.create() }.unwrap();
    assert_eq!((call(&mut copy, sum), call(&mut copy, set), call(&mut copy, sum)), (8000, 0, expected(7)));
    // Without an instance they are the process's.
    assert_eq!((make(), set(), sum()), (0, 0, 8 + 28));
    // Else their destructors would run after the library is gone.
    assert_eq!(get(c"delete_keys")(), 8);
}

#[test]
fn threads_of_a_library_are_in_the_instance_that_made_them() {
    let Some(library) = state() else { return };
    let (mut one, mut two) = (library.create().unwrap(), library.create().unwrap());
    let run_thread = number(&library, c"run_thread");
    assert_eq!(call(&mut one, run_thread), 1001);
    assert_eq!(call(&mut one, run_thread), 2001);
    assert_eq!(call(&mut two, run_thread), 1001);
    one.destroy().unwrap();
}

#[test]
fn an_instance_with_threads_is_not_destroyed() {
    let Some(library) = state() else { return };
    let mut one = library.create().unwrap();
    assert_eq!(call(&mut one, number(&library, c"start_waiting")), 0);
    let (mut one, error) = one.destroy().unwrap_err();
    assert_eq!(error.to_string(), "cannot destroy an instance: 1 of its threads run; end or join them first");
    assert!(matches!(one.reset(), Err(Error::Threads { count: 1, .. })));
    // SAFETY: the function has this type in the library's source.
    let end: extern "C" fn() = unsafe { function(&library, c"end_waiting") };
    one.enter().unwrap().run(|| end());
    // A joined thread has ended, which the instance may learn a moment later: its keys' destructors ran before.
    one.destroy().unwrap();
}

#[test]
fn threads_are_attached() {
    let Some(library) = state() else { return };
    let one = library.create().unwrap();
    let next_local = number(&library, c"next_local");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                // SAFETY: the function uses what the thread has for itself; the counter is not looked at.
                let attached = unsafe { one.attach() }.unwrap();
                assert_eq!((next_local(), next_local()), (5, 6));
                // SAFETY: attaching is refused while this thread is attached to the instance.
                assert!(matches!(unsafe { one.attach() }, Err(Error::Attached)));
                drop(attached);
                assert!(one.detach().is_err());
            });
        }
    });
    one.destroy().unwrap();
}

static INNER: std::sync::Mutex<Option<(Instance, Number)>> = std::sync::Mutex::new(None);

extern "C" fn enters_another(n: i32) -> i32 {
    let mut inner = INNER.lock().unwrap();
    let Some((instance, next)) = &mut *inner else { return 0 };
    for _ in 0..n {
        call(instance, *next);
    }
    call(instance, *next)
}

#[test]
fn callbacks_come_back_to_their_instance() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let mut outer = library.create().unwrap();
    *INNER.lock().unwrap() = Some((library.create().unwrap(), next));
    // SAFETY: the functions have these types in the library's source.
    let (set, call_back): (extern "C" fn(extern "C" fn(i32) -> i32), extern "C" fn(i32) -> i32) =
        unsafe { (function(&library, c"set_callback"), function(&library, c"call_back")) };
    outer.enter().unwrap().run(|| set(enters_another));
    assert_eq!(outer.enter().unwrap().run(|| call_back(5)), 7);
    assert_eq!(call(&mut outer, next), 2);
    // A callback that calls the library itself is in the instance that called it.
    extern "C" fn calls(_: i32) -> i32 {
        NEXT.with(|next| next.get().map_or(0, |next| next()))
    }
    thread_local!(static NEXT: std::cell::Cell<Option<Number>> = const { std::cell::Cell::new(None) });
    NEXT.set(Some(next));
    outer.enter().unwrap().run(|| set(calls));
    assert_eq!(outer.enter().unwrap().run(|| call_back(0)), 4);
    INNER.lock().unwrap().take();
}

#[test]
fn guards_may_end_in_any_order() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let (mut one, mut two, mut three) =
        (library.create().unwrap(), library.create().unwrap(), library.create().unwrap());
    let outer = one.enter().unwrap();
    assert_eq!(next(), 2);
    let middle = two.enter().unwrap();
    let inner = three.enter().unwrap();
    drop(middle);
    assert_eq!(next(), 2);
    drop(outer);
    assert_eq!(next(), 3);
    let own = number(&library, c"times_constructed");
    drop(inner);
    assert_eq!(own(), 1);
    assert_eq!((call(&mut one, next), call(&mut two, next), call(&mut three, next)), (3, 2, 4));
}

#[test]
fn an_attached_thread_may_end_that_while_it_is_in_another_instance() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let (one, mut two, mut three) =
        (library.create().unwrap(), library.create().unwrap(), library.create().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: no other thread is in the instance.
            let attached = unsafe { one.attach() }.unwrap();
            let middle = two.enter().unwrap();
            let inner = three.enter().unwrap();
            drop(attached);
            assert_eq!(next(), 2);
            drop(inner);
            assert_eq!((next(), next()), (2, 3));
            drop(middle);
            // Outside of all instances.
            // SAFETY: no other thread is in the instance.
            drop(unsafe { one.attach() }.unwrap());
        });
    });
    for instance in [one, two, three] {
        instance.destroy().unwrap();
    }
}

/// The instance that a thread is attached to is entered over another one: what it is attached to is the end of the list still.
#[test]
fn an_attached_thread_may_end_that_while_it_is_in_the_instance_again() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let (one, two) = (library.create().unwrap(), library.create().unwrap());
    // SAFETY: this thread alone uses the library.
    let attached = unsafe { one.attach() }.unwrap();
    // SAFETY: this thread leaves both.
    unsafe {
        two.enter_unguarded().unwrap();
        one.enter_unguarded().unwrap();
    }
    assert_eq!(next(), 2);
    drop(attached);
    assert_eq!(next(), 3);
    one.leave().unwrap();
    assert_eq!(next(), 2);
    two.leave().unwrap();
    one.destroy().unwrap();
    two.destroy().unwrap();
}

#[test]
fn an_instance_at_the_place_of_another_has_thread_locals_of_its_own() {
    let Some(library) = state() else { return };
    let next_local = number(&library, c"next_local");
    for _ in 0..3 {
        let mut one = library.create().unwrap();
        assert_eq!((call(&mut one, next_local), call(&mut one, next_local)), (5, 6));
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!((call(&mut one, next_local), call(&mut one, next_local)), (5, 6)));
        });
        assert_eq!(call(&mut one, next_local), 7);
        one.reset().unwrap();
        assert_eq!(call(&mut one, next_local), 5);
        one.destroy().unwrap();
    }
}

static NOT_LEFT: std::sync::Mutex<Option<Instance>> = std::sync::Mutex::new(None);

extern "C" fn does_not_leave(_: i32) -> i32 {
    if let Some(instance) = &mut *NOT_LEFT.lock().unwrap() {
        std::mem::forget(instance.enter().unwrap());
    }
    0
}

#[test]
fn a_thread_that_ends_in_another_instance_is_none_of_that() {
    let Some(library) = state() else { return };
    let (mut one, other) = (library.create().unwrap(), library.create().unwrap());
    *NOT_LEFT.lock().unwrap() = Some(other);
    // SAFETY: the function has this type in the library's source.
    let set: extern "C" fn(extern "C" fn(i32) -> i32) = unsafe { function(&library, c"set_callback") };
    one.enter().unwrap().run(|| set(does_not_leave));
    assert_eq!(call(&mut one, number(&library, c"run_callback_in_thread")), 0);
    one.destroy().unwrap();
    let mut other = NOT_LEFT.lock().unwrap().take().unwrap();
    assert!(matches!(other.enter(), Err(Error::Entered { .. })));
    // It stays, as what was not left does.
    assert!(matches!(other.destroy(), Err((_, Error::Entered { .. }))));
}

#[test]
fn a_panic_leaves_the_instance() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    let mut one = library.create().unwrap();
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        one.enter().unwrap().run(|| -> i32 { panic!("in the instance, at {}", next()) })
    }));
    assert!(panicked.is_err());
    assert_eq!(call(&mut one, next), 3);
}

#[test]
fn what_was_not_left_is_reported() {
    let Some(library) = state() else { return };
    let mut one = library.create().unwrap();
    // As longjmp(3) would.
    std::mem::forget(one.enter().unwrap());
    let error = one.enter().unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot enter an instance: a thread has entered it, this one; leave it first, also where longjmp or an \
         exception passed by"
    );
    assert!(matches!(one.reset(), Err(Error::Entered { own: true, .. })));
    let (one, error) = one.destroy().unwrap_err();
    assert!(matches!(error, Error::Entered { own: true, .. }), "{error}");
    let one = std::thread::spawn(move || {
        assert!(matches!(one.leave(), Err(Error::NotInnermost { entered: false })));
        // SAFETY: the call fails, as another thread is in the instance, and so leaves nothing entered.
        assert!(matches!(unsafe { one.enter_unguarded() }, Err(Error::Entered { own: false, .. })));
        one
    })
    .join()
    .unwrap();
    let mut two = library.create().unwrap();
    let inner = two.enter().unwrap();
    let error = one.leave().unwrap_err();
    assert!(error.to_string().contains("entered another instance of the library since"), "{error}");
    drop(inner);
    one.leave().unwrap();
    assert!(one.leave().is_err());
    one.destroy().unwrap();
}

#[test]
fn an_instance_that_was_not_left_stays() {
    let Some(library) = state() else { return };
    let next = number(&library, c"next");
    std::thread::spawn(move || {
        let mut one = library.create().unwrap();
        std::mem::forget(one.enter().unwrap());
        drop(one);
        // The thread is in it still.
        assert_eq!((next(), next()), (2, 3));
        let mut two = library.create().unwrap();
        assert_eq!(call(&mut two, next), 2);
        assert_eq!(next(), 4);
    })
    .join()
    .unwrap();
}

#[test]
fn jumps_within_a_library_stay_in_the_instance() {
    let Some(library) = state() else { return };
    let mut one = library.create().unwrap();
    call(&mut one, number(&library, c"next"));
    // SAFETY: the function has this type in the library's source.
    let jump: extern "C" fn(i32) -> i32 = unsafe { function(&library, c"jump_within") };
    assert_eq!(one.enter().unwrap().run(|| jump(40)), 42);
}

static ENDED: AtomicI32 = AtomicI32::new(0);

extern "C" fn ended(counter: i32) {
    ENDED.store(counter, Ordering::Relaxed);
}

#[test]
fn functions_at_exit_run_when_the_instance_ends() {
    let Some(library) = state() else { return };
    // SAFETY: the function has this type in the library's source.
    let note_end: extern "C" fn(extern "C" fn(i32)) = unsafe { function(&library, c"note_end") };
    let mut one = library.create().unwrap();
    one.enter().unwrap().run(|| note_end(ended));
    for _ in 0..5 {
        call(&mut one, number(&library, c"next"));
    }
    assert_eq!(ENDED.load(Ordering::Relaxed), 0);
    one.destroy().unwrap();
    assert_eq!(ENDED.load(Ordering::Relaxed), 6);
}

#[test]
fn a_heap_has_a_limit_and_ends_with_its_instance() {
    let Some(path) = built("state.c") else { return };
    // Another file is another library, whose options are its own.
    let directory = tempfile::tempdir().unwrap();
    let copy = directory.path().join("limited.so");
    std::fs::copy(path, &copy).unwrap();
    let library = Library::load_with(&copy, Options { heap_limit: 1 << 20, ..Options::default() }).unwrap();
    // SAFETY: the function has this type in the library's source.
    let allocate: extern "C" fn(usize) -> *mut c_void = unsafe { function(&library, c"allocate") };
    for _ in 0..50 {
        let mut one = library.create().unwrap();
        one.enter().unwrap().run(|| {
            let got = (0..1000).take_while(|_| !allocate(4096).is_null()).count();
            assert!((150..256).contains(&got), "{got} times 4 KiB of 1 MiB");
        });
    }
}

#[test]
fn large_states_are_mapped_and_share_what_is_not_written() {
    let Some(path) = built("large.c") else { return };
    let library = Library::load_with(path, Options { map_state: Some(true), ..Options::default() }).unwrap();
    assert!(library.maps_state());
    // SAFETY: the functions have these types in the library's source.
    let (at, put, put_last): (
        extern "C" fn(i32) -> c_char,
        extern "C" fn(i32, c_char),
        extern "C" fn(c_char),
    ) = unsafe { (function(&library, c"at"), function(&library, c"put"), function(&library, c"put_last")) };
    let mut instances: Vec<Instance> = (0..50).map(|_| library.create().unwrap()).collect();
    for (number, instance) in instances.iter_mut().enumerate() {
        let mark = c_char::try_from(number).unwrap();
        instance.enter().unwrap().run(|| {
            put(500_000, mark);
            put_last(mark + 1);
        });
    }
    for (number, instance) in instances.iter_mut().enumerate() {
        let mark = c_char::try_from(number).unwrap();
        let got = instance.enter().unwrap().run(|| (at(0), at(500_000), at((1 << 20) - 1), at(9)));
        assert_eq!(got, (97, mark, mark + 1, 0));
        instance.reset().unwrap();
        assert_eq!(instance.enter().unwrap().run(|| (at(0), at(500_000))), (97, 0));
    }
}

#[test]
fn snapshots_are_restored_and_copied() {
    let Some(library) = state() else { return };
    // SAFETY: the function has this type in the library's source.
    let append: extern "C" fn(*const c_char) -> *const c_char = unsafe { function(&library, c"append") };
    let next = number(&library, c"next");
    let text = |instance: &mut Instance, more: &str| {
        let more = CString::new(more).unwrap();
        let text = instance.enter().unwrap().run(|| append(more.as_ptr()));
        // SAFETY: it is a C string of the instance.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
    };
    let mut one = library.create().unwrap();
    call(&mut one, next);
    text(&mut one, "before");
    let snapshot = one.snapshot().unwrap();
    for _ in 0..3 {
        assert_eq!(text(&mut one, " and after"), "before and after");
        text(&mut one, &"long ".repeat(100_000));
        assert_eq!(call(&mut one, next), 3);
        one.restore(&snapshot).unwrap();
    }
    one.reset().unwrap();
    one.restore(&snapshot).unwrap();
    assert_eq!(call(&mut one, next), 3);
    // SAFETY: the library's pointers are whole words.
    let mut copies: Vec<Instance> = (0..20).map(|_| unsafe { snapshot.create() }.unwrap()).collect();
    assert_eq!(text(&mut one, "."), "before.");
    for (number, copy) in copies.iter_mut().enumerate() {
        assert_eq!(text(copy, &number.to_string()), format!("before{number}"));
        assert_eq!(call(copy, next), 3);
        assert!(matches!(copy.restore(&snapshot), Err(Error::Foreign)));
    }
    one.destroy().unwrap();
    // What a snapshot has does not end with its instance.
    // SAFETY: the snapshot's pointers are whole words, as `create` requires.
    assert_eq!(text(&mut unsafe { snapshot.create() }.unwrap(), "!"), "before!");
}

#[test]
fn objects_of_classes_are_apart() {
    let Some(path) = built("objects.cc") else { return };
    let library = Library::load(path).unwrap();
    // SAFETY: the functions have these types in the library's source.
    let (put, fails): (extern "C" fn(*const c_char, i32) -> i32, extern "C" fn(i32) -> i32) =
        unsafe { (function(&library, c"put"), function(&library, c"fails")) };
    let (lazily, extend) = (number(&library, c"lazily"), number(&library, c"extend"));
    let (mut one, mut two) = (library.create().unwrap(), library.create().unwrap());
    assert_eq!(one.enter().unwrap().run(|| (put(c"a".as_ptr(), 1), put(c"b".as_ptr(), 2))), (2, 3));
    assert_eq!(two.enter().unwrap().run(|| put(c"c".as_ptr(), 1)), 2);
    assert_eq!((call(&mut one, lazily), call(&mut two, lazily), lazily()), (3, 2, 1));
    assert_eq!((call(&mut one, extend), call(&mut one, extend), call(&mut two, extend)), (6, 7, 6));
    assert_eq!(one.enter().unwrap().run(|| (fails(9), fails(9), fails(2))), (-1, -2, 2));
    assert_eq!(two.enter().unwrap().run(|| fails(9)), -1);
    one.destroy().unwrap();
    // A thread that ends after an instance in which it has objects.
    let mut two = std::thread::spawn(move || {
        assert_eq!(call(&mut two, extend), 6);
        two
    })
    .join()
    .unwrap();
    assert_eq!(call(&mut two, extend), 7);
    std::thread::spawn(move || {
        assert_eq!(call(&mut two, extend), 6);
        two.destroy().unwrap();
    })
    .join()
    .unwrap();
}

/// Each test of this program, with libraries whose accesses are relative to GS; also where the kernel does not allow to
/// set its base without a system call.
#[test]
fn all_holds_relative_to_gs() {
    for options in [&[][..], &[("ORRERY_INSTANCE_FSGSBASE", "off")]] {
        common::repeat_relative_to_gs(&["all_holds_relative_to_gs"], options);
    }
}
