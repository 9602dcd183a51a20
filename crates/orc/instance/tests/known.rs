//! Lua and zlib, built with the pass, in one, two and many instances: each does what the plain library does with a state of
//! its own. With `ORRERY_WHOLE` there are a thousand, more cases, and code that was optimized.

#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulong, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use orrery_orc_instance::{Instance, Library};
use orrery_testing::cls::Build;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// A library that was built plainly, and stays loaded.
struct Plain(*mut c_void);

impl Plain {
    fn load(path: PathBuf) -> Self {
        let path = CString::new(path.into_os_string().as_bytes()).unwrap();
        // SAFETY: the path is a C string, and the library has no constructors that loading it would run.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        Self(handle)
    }

    fn symbol(&self, name: &CStr) -> *mut c_void {
        // SAFETY: the handle is open as long as `self` is, and the name is a C string.
        unsafe { libc::dlsym(self.0, name.as_ptr()) }
    }
}

/// # Safety
/// `F` is the type of a pointer to the function that is there.
unsafe fn typed<F: Copy>(address: *mut c_void) -> F {
    assert!(!address.is_null());
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
    // SAFETY: both are pointers, and the caller knows the type.
    unsafe { std::mem::transmute_copy(&address) }
}

fn is_whole() -> bool {
    std::env::var_os("ORRERY_WHOLE").is_some_and(|value| !value.is_empty() && value != "0")
}

/// Returns how many instances there are at a time.
fn counts() -> [usize; 3] {
    [1, 2, if is_whole() { 1000 } else { 20 }]
}

fn level() -> &'static str {
    if is_whole() { "-O2" } else { "-O0" }
}

fn runner() -> TestRunner {
    let cases = if is_whole() { 8 } else { 1 };
    TestRunner::new(Config { cases, failure_persistence: None, ..Config::default() })
}

type State = *mut c_void;

/// Lua's functions; a state is one interpreter.
#[derive(Clone, Copy)]
struct Lua {
    new: unsafe extern "C" fn() -> State,
    open_libraries: unsafe extern "C" fn(State),
    load: unsafe extern "C" fn(State, *const c_char) -> c_int,
    call: unsafe extern "C" fn(State, c_int, c_int, c_int, isize, *mut c_void) -> c_int,
    text: unsafe extern "C" fn(State, c_int, *mut usize) -> *const c_char,
    set_top: unsafe extern "C" fn(State, c_int),
    close: unsafe extern "C" fn(State),
}

impl Lua {
    fn new(find: impl Fn(&CStr) -> *mut c_void) -> Self {
        // SAFETY: these are the types that lua.h and lauxlib.h declare.
        unsafe {
            Self {
                new: typed(find(c"luaL_newstate")),
                open_libraries: typed(find(c"luaL_openlibs")),
                load: typed(find(c"luaL_loadstring")),
                call: typed(find(c"lua_pcallk")),
                text: typed(find(c"luaL_tolstring")),
                set_top: typed(find(c"lua_settop")),
                close: typed(find(c"lua_close")),
            }
        }
    }

    fn start(self) -> State {
        // SAFETY: the state is a new one.
        unsafe {
            let state = (self.new)();
            (self.open_libraries)(state);
            state
        }
    }

    /// Returns what a chunk returns, or its error.
    fn run(self, state: State, chunk: &str) -> String {
        let chunk = CString::new(chunk).unwrap();
        // SAFETY: the state is open; the text is copied before it leaves the stack.
        unsafe {
            let code = (self.load)(state, chunk.as_ptr());
            let code = if code == 0 { (self.call)(state, 0, 1, 0, 0, std::ptr::null_mut()) } else { code };
            let text = CStr::from_ptr((self.text)(state, -1, std::ptr::null_mut()));
            let answer = format!("{code} {}", text.to_string_lossy());
            (self.set_top)(state, 0);
            answer
        }
    }
}

fn chunk() -> impl Strategy<Value = String> {
    prop_oneof![
        (0..99_u32).prop_map(|n| format!("count = (count or 0) + {n}; return count")),
        "[a-z]{1,40}".prop_map(|text| format!(
            "words = words or {{}}; words[#words + 1] = '{text}'; table.sort(words); return table.concat(words, ' ')"
        )),
        Just("local keys = {}; for key in pairs(_G) do keys[#keys + 1] = key end; return table.concat(keys, ' ')".into()),
        (1..30_u32).prop_map(|n| format!(
            "local t = {{}}; for i in coroutine.wrap(function() for i = 1, {n} do coroutine.yield(i * i) end end) do \
             t[#t + 1] = i end; return table.concat(t, ',')"
        )),
        // An error leaves by longjmp(3).
        (0..9_u32).prop_map(|n| format!(
            "local right, text = pcall(function() local t; return t[{n}] end); return tostring(right) .. text"
        )),
        (0..9_u32).prop_map(|n| format!("error('thrown {n}')")),
        Just("this is no Lua".into()),
        (1..300_u32).prop_map(|n| format!("return (string.rep('ab', {n}):gsub('b', '%0c')):reverse():upper()")),
        (0..9_u32).prop_map(|n| format!(
            "ended = 0; for i = 1, 50 do setmetatable({{}}, {{__gc = function() ended = ended + {n} end}}) end; \
             collectgarbage(); return ended"
        )),
        (1..9999_u32).prop_map(|n| format!("math.randomseed({n}); return math.random(1, 1000000)")),
        Just("return math.random(1, 1000000)".into()),
    ]
}

#[test]
fn lua_answers_in_instances_as_it_does_plainly() {
    let build = |build| orrery_testing::cls::lua(level(), build);
    let (Some(ours), Some(plain)) = (build(Build::of_instances()), build(Build::Plain)) else { return };
    let (library, plain) = (Library::load(ours).unwrap(), Plain::load(plain));
    let ours = Lua::new(|name| library.symbol(name).unwrap().as_ptr());
    let plain = Lua::new(|name| plain.symbol(name));
    for count in counts() {
        let steps = prop::collection::vec((0..count, chunk(), 0..30_u32), 1..(100 + count));
        let run = |steps: Vec<(usize, String, u32)>| {
            let mut instances: Vec<(Instance, State, State)> = Vec::new();
            for _ in 0..count {
                let mut instance = library.create().unwrap();
                let state = instance.enter().unwrap().run(|| ours.start());
                // So that the next number at random is the same.
                let theirs = plain.start();
                instance.enter().unwrap().run(|| ours.run(state, "math.randomseed(7)"));
                plain.run(theirs, "math.randomseed(7)");
                instances.push((instance, state, theirs));
            }
            for (which, chunk, event) in steps {
                let (instance, state, theirs) = &mut instances[which];
                let answer = instance.enter().unwrap().run(|| ours.run(*state, &chunk));
                prop_assert_eq!(answer, plain.run(*theirs, &chunk), "{}", chunk);
                if event == 0 {
                    // As if nothing had happened since.
                    let snapshot = instance.snapshot().unwrap();
                    let spoil = "for key in pairs(_G) do _G[key] = nil end; count = -1";
                    instance.enter().unwrap().run(|| ours.run(*state, spoil));
                    instance.restore(&snapshot).unwrap();
                }
            }
            for (instance, state, theirs) in &mut instances {
                // Half of them end with all that they have allocated.
                if state.addr() / 64 % 2 == 0 {
                    // SAFETY: the state is open, and used no more.
                    instance.enter().unwrap().run(|| unsafe { (ours.close)(*state) });
                }
                // SAFETY: the state is open, and not used after this call.
                unsafe { (plain.close)(*theirs) };
            }
            Ok(())
        };
        runner().run(&steps, run).unwrap();
    }
}

/// Is laid out as `z_stream` of zlib.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct Stream {
    next_in: *const u8,
    available_in: c_uint,
    total_in: c_ulong,
    next_out: *mut u8,
    available_out: c_uint,
    total_out: c_ulong,
    message: *const c_char,
    state: *mut c_void,
    allocate: *mut c_void,
    free: *mut c_void,
    opaque: *mut c_void,
    data_type: c_int,
    adler: c_ulong,
    reserved: c_ulong,
}

impl Stream {
    fn new() -> Box<Self> {
        // SAFETY: null pointers and zeros, as the library asks for.
        Box::new(unsafe { std::mem::zeroed() })
    }
}

const FINISH: c_int = 4;
const STREAM_END: c_int = 1;

#[derive(Clone, Copy)]
struct Zlib {
    version: unsafe extern "C" fn() -> *const c_char,
    deflate_init: unsafe extern "C" fn(*mut Stream, c_int, *const c_char, c_int) -> c_int,
    deflate: unsafe extern "C" fn(*mut Stream, c_int) -> c_int,
    deflate_end: unsafe extern "C" fn(*mut Stream) -> c_int,
    inflate_init: unsafe extern "C" fn(*mut Stream, *const c_char, c_int) -> c_int,
    inflate: unsafe extern "C" fn(*mut Stream, c_int) -> c_int,
    inflate_end: unsafe extern "C" fn(*mut Stream) -> c_int,
}

impl Zlib {
    fn new(find: impl Fn(&CStr) -> *mut c_void) -> Self {
        // SAFETY: these are the types that zlib.h declares.
        unsafe {
            Self {
                version: typed(find(c"zlibVersion")),
                deflate_init: typed(find(c"deflateInit_")),
                deflate: typed(find(c"deflate")),
                deflate_end: typed(find(c"deflateEnd")),
                inflate_init: typed(find(c"inflateInit_")),
                inflate: typed(find(c"inflate")),
                inflate_end: typed(find(c"inflateEnd")),
            }
        }
    }

    fn start(self, level: c_int) -> Pair {
        let (mut deflating, mut inflating) = (Stream::new(), Stream::new());
        let size = c_int::try_from(size_of::<Stream>()).unwrap();
        // SAFETY: the streams stay where they are.
        unsafe {
            assert_eq!((self.deflate_init)(&raw mut *deflating, level, (self.version)(), size), 0);
            assert_eq!((self.inflate_init)(&raw mut *inflating, (self.version)(), size), 0);
        }
        Pair { zlib: self, deflating, inflating }
    }
}

/// An instance with its streams, the plain library's, what they were given, and what they returned.
type Streams = (Instance, Pair, Pair, Vec<u8>, Vec<u8>);

/// Two streams, of which one undoes what the other does.
struct Pair {
    zlib: Zlib,
    deflating: Box<Stream>,
    inflating: Box<Stream>,
}

impl Pair {
    /// Returns what data become, and what that becomes.
    fn run(&mut self, data: &[u8], flush: c_int) -> (Vec<u8>, Vec<u8>) {
        let Zlib { deflate, inflate, .. } = self.zlib;
        let packed = drain(&mut self.deflating, data, |stream| {
            // SAFETY: the stream was initialized, and its buffers are there.
            unsafe { deflate(stream, flush) }
        });
        // SAFETY: the stream was initialized, and its buffers live until the call returns.
        let data = drain(&mut self.inflating, &packed, |stream| unsafe { inflate(stream, 0) });
        (packed, data)
    }

    fn end(mut self) {
        // SAFETY: the streams were initialized, and are used no more.
        unsafe {
            (self.zlib.deflate_end)(&raw mut *self.deflating);
            assert_eq!((self.zlib.inflate_end)(&raw mut *self.inflating), 0);
        }
    }
}

/// Has a stream work until it has taken all input, and has no more output.
fn drain(stream: &mut Box<Stream>, data: &[u8], mut work: impl FnMut(*mut Stream) -> c_int) -> Vec<u8> {
    let (mut output, mut buffer) = (Vec::new(), [0_u8; 300]);
    (stream.next_in, stream.available_in) = (data.as_ptr(), c_uint::try_from(data.len()).unwrap());
    loop {
        (stream.next_out, stream.available_out) = (buffer.as_mut_ptr(), 300);
        let code = work(&raw mut **stream);
        let free = usize::try_from(stream.available_out).unwrap();
        output.extend_from_slice(&buffer[..buffer.len() - free]);
        // Z_BUF_ERROR: there is nothing more to do.
        assert!([0, STREAM_END, -5].contains(&code), "{code}");
        if code != 0 || free > 0 {
            return output;
        }
    }
}

#[test]
fn zlib_packs_in_instances_as_it_does_plainly() {
    let build = |build| orrery_testing::cls::zlib(level(), build);
    let (Some(ours), Some(plain)) = (build(Build::of_instances()), build(Build::Plain)) else { return };
    let (library, plain) = (Library::load(ours).unwrap(), Plain::load(plain));
    let ours = Zlib::new(|name| library.symbol(name).unwrap().as_ptr());
    let plain = Zlib::new(|name| plain.symbol(name));
    for count in counts() {
        let data = prop_oneof![
            prop::collection::vec(any::<u8>(), 0..2000),
            prop::collection::vec(0..3_u8, 0..5000),
            "[a-f ]{0,900}".prop_map(String::into_bytes),
        ];
        // Z_NO_FLUSH, Z_PARTIAL_FLUSH, Z_SYNC_FLUSH, Z_FULL_FLUSH.
        let steps = prop::collection::vec((0..count, data, 0..4, 0..20_u32), 1..(60 + count));
        let run = |steps: Vec<(usize, Vec<u8>, c_int, u32)>| {
            let mut instances: Vec<Streams> = Vec::new();
            for number in 0..count {
                let level = c_int::try_from(number % 10).unwrap();
                let mut instance = library.create().unwrap();
                let pair = instance.enter().unwrap().run(|| ours.start(level));
                instances.push((instance, pair, plain.start(level), Vec::new(), Vec::new()));
            }
            for (which, data, flush, event) in steps {
                let (instance, pair, theirs, given, returned) = &mut instances[which];
                if event == 0 {
                    // The stream of the caller is no part of the instance.
                    let before = (*pair.deflating, *pair.inflating);
                    let snapshot = instance.snapshot().unwrap();
                    instance.enter().unwrap().run(|| pair.run(b"what is undone", 2));
                    instance.restore(&snapshot).unwrap();
                    (*pair.deflating, *pair.inflating) = before;
                }
                let answer = instance.enter().unwrap().run(|| pair.run(&data, flush));
                prop_assert_eq!(&answer, &theirs.run(&data, flush));
                given.extend(data);
                returned.extend(answer.1);
            }
            for (mut instance, mut pair, mut theirs, given, mut returned) in instances {
                let answer = instance.enter().unwrap().run(|| pair.run(b"end", FINISH));
                prop_assert_eq!(&answer, &theirs.run(b"end", FINISH));
                returned.extend(answer.1);
                prop_assert_eq!(returned, [given, b"end".to_vec()].concat());
                theirs.end();
                instance.enter().unwrap().run(|| pair.end());
                instance.destroy().map_err(|(_, error)| error).unwrap();
            }
            Ok(())
        };
        runner().run(&steps, run).unwrap();
    }
}

/// Each test of this program, with libraries whose accesses are relative to GS.
#[test]
fn all_holds_relative_to_gs() {
    common::repeat_relative_to_gs(&["all_holds_relative_to_gs"], &[]);
}
