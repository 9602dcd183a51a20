//! Lua and libcrypto, by a call of each: in an instance, in the plain library, and each time in a state that is as new.
//!
//! libcrypto is built by `orrery-cc` from the sources of Debian's package, without assembly, which names a variable. What it is compared
//! with is Debian's own.

use std::ffi::{CStr, CString, c_int, c_void};
use std::fmt;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail, ensure};
use orrery_orc_instance::Library;
use orrery_sys::scheduling::thread_cpu_time;
use orrery_testing::{cls, root, target_directory};

use super::fresh::{each, time_of_children};
use super::lua::{self, Lua};
use super::sqlite::function;
use super::{child, nanoseconds};
use crate::Skipped;

/// One of the libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Lua 5.4: a chunk is compiled and run, which has a loop of 1,000 turns.
    Lua,
    /// OpenSSL's libcrypto: the SHA-256 of 1 KiB, by `EVP_Digest`.
    Crypto,
}

impl fmt::Display for Known {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Lua => "lua",
            Self::Crypto => "libcrypto",
        })
    }
}

/// The functions of a library, as far as they are called.
#[derive(Clone, Copy, Debug)]
pub enum Functions {
    /// Of Lua.
    Lua(Lua),
    /// Of libcrypto: `EVP_sha256`, `EVP_Digest`.
    Crypto(
        unsafe extern "C" fn() -> *const c_void,
        unsafe extern "C" fn(*const c_void, usize, *mut u8, *mut u32, *const c_void, *mut c_void) -> c_int,
    ),
}

/// What a library needs for its calls: a state of Lua, or nothing.
pub type State = lua::State;

impl Functions {
    /// Finds the functions.
    ///
    /// # Errors
    /// One is not there.
    ///
    /// # Safety
    /// `find` returns addresses of functions of `known`, which stays loaded while what is returned is used.
    unsafe fn new(known: Known, find: impl Fn(&CStr) -> Result<*mut c_void>) -> Result<Self> {
        // SAFETY: these are the types that lua.h, lauxlib.h and openssl/evp.h declare.
        unsafe {
            Ok(match known {
                Known::Lua => Self::Lua(Lua::new(find)?),
                Known::Crypto => Self::Crypto(function(find(c"EVP_sha256")?), function(find(c"EVP_Digest")?)),
            })
        }
    }

    /// Finds the functions in a library that has instances.
    ///
    /// # Errors
    /// One is not there.
    ///
    /// # Safety
    /// The library is `known`, and stays loaded while what is returned is used.
    pub unsafe fn of_instances(known: Known, library: &Library) -> Result<Self> {
        // SAFETY: the library is `known` (# Safety).
        unsafe { Self::new(known, |name| Ok(library.symbol(name)?.as_ptr())) }
    }

    /// Loads a plain library, for good, and finds the functions in it.
    ///
    /// # Errors
    /// It cannot be loaded, or a function is not there.
    ///
    /// # Safety
    /// The file is `known`.
    pub unsafe fn of_plain(known: Known, library: &Path) -> Result<Self> {
        let path = CString::new(library.as_os_str().as_bytes())?;
        // SAFETY: the constructors of these libraries need nothing; the library is never closed.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        ensure!(!handle.is_null(), "cannot load {}", library.display());
        // SAFETY: the library is `known` (# Safety), and stays loaded.
        unsafe {
            Self::new(known, |name| {
                let address = libc::dlsym(handle, name.as_ptr());
                ensure!(!address.is_null(), "{known} has no {}", name.to_string_lossy());
                Ok(address)
            })
        }
    }

    /// Makes what calls need.
    ///
    /// # Errors
    /// The library has no memory.
    pub fn open(self) -> Result<State> {
        match self {
            Self::Lua(lua) => lua.open(),
            Self::Crypto(..) => Ok(std::ptr::null_mut()),
        }
    }

    /// Makes one call.
    ///
    /// # Errors
    /// It fails.
    ///
    /// # Safety
    /// [`Functions::open`] returned the state, in the instance that this thread is in.
    pub unsafe fn call(self, state: State) -> Result<()> {
        match self {
            // SAFETY: the state is Lua's (# Safety).
            Self::Lua(lua) => unsafe { lua.run(state, CHUNK) },
            Self::Crypto(sha256, digest) => {
                let data = [b'a'; 1024];
                let mut out = [0_u8; 32];
                // SAFETY: `data` has as many bytes as said, and a SHA-256 has 32; null pointers are allowed.
                let code = unsafe {
                    let kind = sha256();
                    let (data, out) = (data.as_ptr().cast(), out.as_mut_ptr());
                    digest(data, 1024, out, std::ptr::null_mut(), kind, std::ptr::null_mut())
                };
                ensure!(code == 1 && out[..4] == SHA256, "a digest is wrong: {code}, {out:02x?}");
                Ok(())
            }
        }
    }
}

/// What Lua's call runs.
const CHUNK: &CStr =
    c"local sum = 0 for i = 1, 1000 do sum = sum + i % 7 end if sum ~= 3003 then error(sum) end";
/// The first bytes of the SHA-256 of 1,024 times the letter a.
const SHA256: [u8; 4] = [0x2e, 0xdc, 0x98, 0x68];

/// Returns libcrypto, built with the pass; builds it, which takes minutes, unless that was done or is not wanted.
///
/// # Errors
/// [`Skipped`] where it cannot be built; otherwise the build fails.
pub fn libcrypto(may_build: bool) -> Result<PathBuf> {
    let Some(pass) = cls::pass() else { bail!(Skipped("there is no LLVM for the pass".to_owned())) };
    let target = target_directory();
    let base = target.parent().unwrap_or(&target).join("libraries");
    let directory = base.join("libcrypto-instances");
    let output = directory.join("libcrypto-instances.so");
    // Debian's libssl is not linked with it: its functions are found by their names in this file alone.
    let script = "../openssl/Configure linux-x86_64-clang no-shared no-asm no-module no-dso && make -j2 build_generated libcrypto.a && \
                  $CC -shared -Wl,-z,defs -Wl,-Bsymbolic -Wl,--whole-archive libcrypto.a -Wl,--no-whole-archive -o libcrypto-instances.so -lpthread";
    let stamp = directory.join("built");
    let age = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    let parts = std::fs::read_dir(pass.join("lib"))?.flatten();
    let newest = parts.filter_map(|part| age(&part.path())).max();
    if std::fs::read_to_string(&stamp).is_ok_and(|line| line == script) && age(&stamp) >= newest {
        return Ok(output);
    }
    if !may_build {
        bail!(Skipped("it is not built, which takes minutes: run the benchmark without QUICK=1".to_owned()));
    }
    if let Some(tool) = ["apt-get", "make", "perl"].iter().find(|tool| !orrery_testing::is_there(tool)) {
        bail!(Skipped(format!("there is no {tool}")));
    }
    let fetched = Command::new(root().join("scripts/debian-source")).arg(&base).arg("openssl").output()?;
    if !fetched.status.success() {
        let errors = String::from_utf8_lossy(&fetched.stderr);
        bail!(Skipped(format!("its sources cannot be fetched: {}", errors.trim_end())));
    }
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory)?;
    let mut shell = Command::new("sh");
    shell.args(["-euc", script]).current_dir(&directory).env("CC", pass.join("bin/orrery-cc"));
    shell.env("ORRERY_CLS_LIB", pass.join("lib")).env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
    if let Some(version) = cls::version() {
        shell.env("ORRERY_CLANG", format!("clang-{version}"));
    }
    let made = shell.output()?;
    let errors = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "cannot build libcrypto: {}", errors.lines().last().unwrap_or_default());
    std::fs::write(&stamp, script)?;
    Ok(output)
}

/// Returns Debian's libcrypto.
///
/// # Errors
/// [`Skipped`] where it is elsewhere.
pub fn plain_libcrypto() -> Result<PathBuf> {
    let path = PathBuf::from("/usr/lib/x86_64-linux-gnu/libcrypto.so.3");
    if !path.exists() {
        bail!(Skipped(format!("there is no {}", path.display())));
    }
    Ok(path)
}

/// Returns nanoseconds of a call: in an instance, which is entered for it, in the same library outside of instances, and in the plain one.
///
/// # Errors
/// A call fails.
///
/// # Safety
/// Both files are `known`, the first built with the pass.
pub unsafe fn measure_call(known: Known, with_pass: &Path, plain: &Path) -> Result<[f64; 3]> {
    const COUNT: usize = 10_000;
    let library = Library::load(with_pass)?;
    // SAFETY: both are `known` (# Safety); `library` lives until this returns, the plain one stays loaded.
    let (ours, theirs) =
        unsafe { (Functions::of_instances(known, &library)?, Functions::of_plain(known, plain)?) };
    let mut instance = library.create()?;
    let state = instance.enter()?.run(|| ours.open())?;
    for _ in 0..COUNT / 10 {
        // SAFETY: the state is of this instance, which is entered.
        instance.enter()?.run(|| unsafe { ours.call(state) })?;
    }
    let begin = thread_cpu_time();
    for _ in 0..COUNT {
        // SAFETY: the state is of this instance, which is entered.
        instance.enter()?.run(|| unsafe { ours.call(state) })?;
    }
    let mut found = [nanoseconds(begin, COUNT), 0.0, 0.0];
    for (found, functions) in found[1..].iter_mut().zip([ours, theirs]) {
        let state = functions.open()?;
        for _ in 0..COUNT / 10 {
            // SAFETY: the state is of these functions, and this thread is in no instance.
            unsafe { functions.call(state) }?;
        }
        let begin = thread_cpu_time();
        for _ in 0..COUNT {
            // SAFETY: the state is of these functions, and this thread is in no instance.
            unsafe { functions.call(state) }?;
        }
        *found = nanoseconds(begin, COUNT);
    }
    Ok(found)
}

/// How a call finds a state that is as new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fresh {
    /// One instance is reset after each call.
    Reset,
    /// An instance is created and destroyed for each.
    Create,
    /// A process is forked for each.
    Process,
}

impl Fresh {
    const ALL: [Self; 3] = [Self::Reset, Self::Create, Self::Process];
}

impl fmt::Display for Fresh {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Reset => "reset",
            Self::Create => "create and destroy",
            Self::Process => "fork and exit",
        })
    }
}

/// The first argument of the process that measures.
const MEASURE: &str = "measure-fresh-calls";

/// Measures a call in a new state, with making that state, in a process of its own; returns microseconds.
///
/// # Errors
/// The call fails.
pub fn measure_fresh(known: Known, fresh: Fresh, library: &Path) -> Result<f64> {
    let [taken] = child::measure(MEASURE, [&known.to_string(), &fresh.to_string()], library)?;
    Ok(taken)
}

/// Does what [`measure_fresh`] started this process for, and returns whether it did.
///
/// # Errors
/// A call fails.
pub fn serve() -> Result<bool> {
    let Some((known, fresh, library)) = child::arguments(MEASURE) else { return Ok(false) };
    let known = if known == Known::Lua.to_string() { Known::Lua } else { Known::Crypto };
    let fresh = Fresh::ALL.into_iter().find(|way| way.to_string() == fresh);
    let library = Path::new(&library);
    // SAFETY: `measure_fresh` is given files of the library that it names.
    let taken = unsafe {
        match fresh.context("no such way")? {
            Fresh::Process => processes(known, library),
            fresh => instances(known, fresh, library),
        }
    }?;
    println!("{taken}");
    Ok(true)
}

/// # Safety
/// The file is `known`, built with the pass.
unsafe fn instances(known: Known, fresh: Fresh, library: &Path) -> Result<f64> {
    const COUNT: usize = 500;
    let library = Library::load(library)?;
    // SAFETY: the library is `known` (# Safety), and lives until this returns.
    let functions = unsafe { Functions::of_instances(known, &library) }?;
    let mut instance = library.create()?;
    let begin = thread_cpu_time();
    for _ in 0..COUNT {
        if fresh == Fresh::Create {
            instance = library.create()?;
        }
        instance.enter()?.run(|| {
            let state = functions.open()?;
            // SAFETY: the state is of this instance, which is entered.
            unsafe { functions.call(state) }
        })?;
        if fresh == Fresh::Reset {
            instance.reset()?;
        }
    }
    Ok(each(thread_cpu_time() - begin, COUNT))
}

/// # Safety
/// The file is `known`, and this process has one thread.
unsafe fn processes(known: Known, library: &Path) -> Result<f64> {
    const COUNT: usize = 100;
    // SAFETY: the file is `known` (# Safety).
    let functions = unsafe { Functions::of_plain(known, library) }?;
    let (before, begin) = (time_of_children(), thread_cpu_time());
    for _ in 0..COUNT {
        // SAFETY: this process has one thread (# Safety), so the child may call anything.
        let child = unsafe { libc::fork() };
        ensure!(child >= 0, "cannot fork");
        if child == 0 {
            let called = functions.open().and_then(|state| {
                // SAFETY: the state is of these functions.
                unsafe { functions.call(state) }
            });
            // SAFETY: nothing is left to be done at the end of this process.
            unsafe { libc::_exit(i32::from(called.is_err())) };
        }
        let mut status = 0;
        // SAFETY: it is a child of this process; the kernel writes one number to `status`.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!(waited == child && status == 0, "a child failed");
    }
    Ok(each(thread_cpu_time() - begin + (time_of_children() - before), COUNT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_run_in_instances_and_after_each_reset() {
        let Some(library) = cls::lua("-O2", cls::Build::Word) else { return };
        let library = Library::load(library).unwrap();
        // SAFETY: the library is Lua, and lives until this returns.
        let lua = unsafe { Functions::of_instances(Known::Lua, &library) }.unwrap();
        let mut instances = [library.create().unwrap(), library.create().unwrap()];
        for _ in 0..3 {
            for instance in &mut instances {
                let state = instance.enter().unwrap().run(|| lua.open()).unwrap();
                // SAFETY: the state is of this instance, which is entered.
                instance.enter().unwrap().run(|| unsafe { lua.call(state) }).unwrap();
                instance.reset().unwrap();
            }
        }
    }

    #[test]
    fn debians_libcrypto_makes_the_digest_that_the_benchmark_expects() {
        let Ok(library) = plain_libcrypto() else {
            orrery_testing::skipped!("Debian's libcrypto is not here");
            return;
        };
        // SAFETY: the file is libcrypto.
        let crypto = unsafe { Functions::of_plain(Known::Crypto, &library) }.unwrap();
        // SAFETY: libcrypto has no state that would have to be opened.
        unsafe { crypto.call(crypto.open().unwrap()) }.unwrap();
    }
}
