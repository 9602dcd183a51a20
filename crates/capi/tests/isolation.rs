//! Instances of `orrery-orc-instance` in contexts of `orrery-context` and in orbits of `orrery-orbit`, from Rust.
//!
//! Contexts belong to a process, so each case is a process of its own.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::ffi::{CString, c_char, c_void};
use std::ptr::NonNull;
use std::sync::Mutex;

use orrery_context::{self as context, Context, Error, Spec};
use orrery_orbit::{Backoff, Call, Orbit, Restart};
use orrery_orc_instance::{Instance, Library, MappedLibrary};
use orrery_testing::cls::Build;

orrery_testing::cases![
    seconds = 120, trackers = &[];
    instances_in_contexts_are_apart,
    an_entered_instance_goes_on_in_a_context,
    instances_of_a_context_are_its_own,
    instances_in_orbits_are_apart,
    mapped_instances_in_contexts_and_orbits_are_apart,
];

type Serve = extern "C" fn(*const c_char) -> i64;

/// The library of `examples/isolation`.
struct Sums {
    library: Library,
    serve: Serve,
}

impl Sums {
    /// Returns it for the life of the process, of which contexts and orbits are copies.
    fn load() -> Option<&'static Self> {
        let source = orrery_testing::root().join("examples/isolation/library/sums.c");
        let library = orrery_testing::cls::library("sums", &[source], &["-O1"], Build::Word)?;
        let library = Library::load(library).unwrap();
        // SAFETY: that is the function's type.
        let serve = unsafe { function(library.symbol(c"serve").unwrap()) };
        Some(Box::leak(Box::new(Self { library, serve })))
    }

    fn create(&self) -> &'static Mutex<Instance> {
        Box::leak(Box::new(Mutex::new(self.library.create().unwrap())))
    }

    /// Serves a request in an instance.
    fn ask(&self, instance: &Mutex<Instance>, request: &str) -> i64 {
        instance.lock().unwrap().enter().unwrap().run(|| ask(self.serve, request))
    }

    /// Returns the request that writes into the first number of another instance.
    fn into_another(from: &Mutex<Instance>, other: &Mutex<Instance>) -> String {
        let [from, other] = [from, other].map(|instance| {
            instance.lock().unwrap().variable(c"numbers").unwrap().addr().get().cast_signed()
        });
        format!("put {} 666", (other - from) / 8)
    }
}

/// Returns the function at an address.
///
/// # Safety
/// There is such a function, of this type.
unsafe fn function(address: NonNull<c_void>) -> Serve {
    // SAFETY: the caller's promise.
    unsafe { std::mem::transmute::<NonNull<c_void>, Serve>(address) }
}

fn ask(serve: Serve, request: &str) -> i64 {
    serve(CString::new(request).unwrap().as_ptr())
}

const CRASH: &str = "put 1152921504606846975 1";

/// Returns a context that serves the requests with which it is switched to.
fn server(mut serve: impl FnMut(&str) -> i64 + 'static) -> Context {
    context::create(&Spec::new(), move |start| {
        let mut arrival = start.arrival;
        loop {
            let request = String::from_utf8(arrival.bytes).unwrap();
            arrival = arrival.caller.switch(serve(&request).cast_unsigned(), &[]).unwrap();
        }
    })
    .unwrap()
}

fn ask_context(server: Context, request: &str) -> Result<i64, Error> {
    server.switch(0, request.as_bytes()).map(|arrival| arrival.word.cast_signed())
}

/// Returns an orbit whose tasks serve the requests that are their arguments.
fn orbit(serve: impl Fn(&str) -> i64 + Send + Sync + 'static) -> Orbit {
    Orbit::builder("server")
        .entry(move |task| serve(std::str::from_utf8(task.arguments()).unwrap()))
        .restart(Restart::OnCrash(Backoff::default()))
        .create()
        .unwrap()
}

fn ask_orbit(orbit: &Orbit, request: &str) -> orrery_orbit::Result<i64> {
    orbit.call(&Call::new().arguments(request.as_bytes()))
}

fn instances_in_contexts_are_apart() {
    let Some(sums) = Sums::load() else { return };
    let (one, two) = (sums.create(), sums.create());
    assert_eq!((sums.ask(one, "put 0 40"), sums.ask(two, "put 0 7")), (40, 7));
    let [of_one, of_two] = [one, two].map(|instance| server(move |request| sums.ask(instance, request)));
    // They begin as copies of the program's.
    assert_eq!(ask_context(of_one, "put 1 2"), Ok(42));
    assert_eq!(sums.ask(one, "sum"), 40);
    of_one.checkpoint().unwrap();
    // In the context, it reaches the other instance: a copy.
    let into_two = Sums::into_another(one, two);
    assert_eq!(ask_context(of_one, &into_two), Ok(42 + 666 - 7));
    assert_eq!(sums.ask(two, "put 0 8"), 8);
    assert_eq!(ask_context(of_two, "put 0 9"), Ok(9));
    // A crash takes it back to where it was saved.
    assert!(matches!(ask_context(of_one, CRASH), Err(Error::Died { .. })));
    assert_eq!(ask_context(of_one, "sum"), Ok(42));
    of_one.close().unwrap();
    assert_eq!((sums.ask(one, "sum"), sums.ask(two, "sum")), (40, 8));
    assert_eq!(ask_context(of_two, "sum"), Ok(9));
    // Without a context, the other one's number is another.
    sums.ask(one, &into_two);
    assert_eq!(sums.ask(two, "put 0 8"), 8 + 8 - 666);
}

fn an_entered_instance_goes_on_in_a_context() {
    let Some(sums) = Sums::load() else { return };
    let (one, two) = (sums.create(), sums.create());
    let server = one.lock().unwrap().enter().unwrap().run(|| {
        assert_eq!(ask(sums.serve, "put 0 3"), 3);
        // The thread is in the instance in the context, too, and can enter others from there.
        let server = server(move |request| ask(sums.serve, request) * 100 + sums.ask(two, request));
        assert_eq!(ask_context(server, "put 1 4"), Ok(704));
        assert_eq!(ask(sums.serve, "sum"), 3);
        server
    });
    assert_eq!(ask_context(server, "sum"), Ok(704));
    assert_eq!((sums.ask(one, "sum"), sums.ask(two, "sum")), (3, 0));
    assert_eq!(ask(sums.serve, "sum"), 0);
}

fn instances_of_a_context_are_its_own() {
    let Some(sums) = Sums::load() else { return };
    let mut made = Vec::new();
    let server = server(move |request| {
        let instance = sums.library.create().unwrap();
        let numbers = instance.variable(c"numbers").unwrap().addr().get();
        let instance = Mutex::new(instance);
        let answer = sums.ask(&instance, request);
        made.push(instance);
        // One that ends gives its place to the next one.
        if made.len() > 1 {
            made.remove(0).into_inner().unwrap().destroy().unwrap();
        }
        assert_eq!(made.iter().map(|instance| sums.ask(instance, "sum")).sum::<i64>(), answer);
        i64::try_from(numbers).unwrap()
    });
    let in_context = ask_context(server, "put 0 5").unwrap();
    // The program's next instance has the same addresses, and is another one.
    let own = sums.create();
    let place = own.lock().unwrap().variable(c"numbers").unwrap().addr().get();
    assert_eq!(i64::try_from(place), Ok(in_context));
    assert_eq!(sums.ask(own, "put 1 6"), 6);
    for _ in 0..100 {
        ask_context(server, "put 2 9").unwrap();
    }
    server.close().unwrap();
    assert_eq!(sums.ask(own, "sum"), 6);
}

fn instances_in_orbits_are_apart() {
    let Some(sums) = Sums::load() else { return };
    let (one, two) = (sums.create(), sums.create());
    assert_eq!((sums.ask(one, "put 0 40"), sums.ask(two, "put 0 7")), (40, 7));
    let [of_one, of_two] = [one, two].map(|instance| orbit(move |request| sums.ask(instance, request)));
    assert_eq!(ask_orbit(&of_one, "put 1 2").unwrap(), 42);
    let into_two = Sums::into_another(one, two);
    assert_eq!(ask_orbit(&of_one, &into_two).unwrap(), 42 + 666 - 7);
    assert_eq!(ask_orbit(&of_two, "put 0 9").unwrap(), 9);
    assert_eq!((sums.ask(one, "sum"), sums.ask(two, "put 0 8")), (40, 8));
    assert!(ask_orbit(&of_one, CRASH).is_err());
    // It is started anew with the program's instance as it is now.
    assert_eq!(ask_orbit(&of_one, "sum").unwrap(), 40);
    assert_eq!(ask_orbit(&of_two, "sum").unwrap(), 9);
    // An instance that a task makes is gone with the orbit.
    let maker = orbit(move |request| {
        let made = sums.create();
        sums.ask(made, "put 0 1");
        sums.ask(made, request)
    });
    assert_eq!(ask_orbit(&maker, "put 1 2").unwrap(), 3);
    let own = sums.create();
    assert_eq!((sums.ask(own, "sum"), sums.ask(one, "sum"), sums.ask(two, "sum")), (0, 40, 8));
}

fn mapped_instances_in_contexts_and_orbits_are_apart() {
    let source = orrery_testing::root().join("examples/isolation/library/sums.c");
    let Some(library) = orrery_testing::cls::library("sums-plain", &[source], &["-O1"], Build::Plain) else {
        return;
    };
    let library = MappedLibrary::load(library).unwrap();
    // SAFETY: they are leaked, so that their functions stay.
    let [one, two] = [(); 2].map(|()| Box::leak(Box::new(unsafe { library.create().unwrap() })));
    // SAFETY: that is the function's type.
    let [serve, of_two] = [&one, &two].map(|mapped| unsafe { function(mapped.symbol(c"serve").unwrap()) });
    let [numbers, others] =
        [&one, &two].map(|mapped| mapped.symbol(c"numbers").unwrap().addr().get().cast_signed());
    let into_two = format!("put {} 666", (others - numbers) / 8);
    assert_eq!((ask(serve, "put 0 40"), ask(of_two, "put 0 7")), (40, 7));
    let context = server(move |request| ask(serve, request));
    let orbit = orbit(move |request| ask(serve, request));
    assert_eq!(ask_context(context, &into_two), Ok(40 + 666 - 7));
    assert_eq!(ask_orbit(&orbit, &into_two).unwrap(), 40 + 666 - 7);
    assert!(matches!(ask_context(context, CRASH), Err(Error::Died { .. })));
    assert!(ask_orbit(&orbit, CRASH).is_err());
    assert_eq!((ask(serve, "sum"), ask(of_two, "put 0 8")), (40, 8));
    assert_eq!(ask_orbit(&orbit, "put 0 41").unwrap(), 41);
}
