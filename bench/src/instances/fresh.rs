//! What copies of a library take, each number of them measured in a process that had none before.
//!
//! Memory that was used once is at hand the second time, so a process that makes its second ten thousand instances says
//! nothing about the first. Times are of the processor, so that a busy machine changes them little.

use std::ffi::CString;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use orrery_orc_instance::{Instance, Library, MappedInstance, MappedLibrary};
use orrery_sys::scheduling::{process_cpu_time, thread_cpu_time};

use super::{child, wasm};

/// How a library is had several times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// As instances.
    Instances,
    /// As instances of the plain library, each a mapping.
    Mapped,
    /// By dlmopen(3), each in a namespace.
    Namespaces,
    /// By fork(2), each in a process.
    Processes,
    /// As instances of wasmtime, their memory mapped on demand.
    Wasm,
    /// As instances of wasmtime, their memory from a pool.
    WasmPool,
}

impl fmt::Display for Way {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Instances => "instances",
            Self::Mapped => "mapped",
            Self::Namespaces => "dlmopen",
            Self::Processes => "a process each",
            Self::Wasm => "wasmtime",
            Self::WasmPool => "wasmtime, pooled",
        })
    }
}

/// What one of several copies takes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Taken {
    /// How many there were; fewer than asked for where there can be no more.
    pub count: f64,
    /// Private memory of each with the page tables that map it, in KiB.
    pub kib: f64,
    /// Microseconds of processor time to make one.
    pub create: f64,
    /// Microseconds of processor time to end one.
    pub destroy: f64,
}

/// The first argument of the process that measures.
const MEASURE: &str = "measure-copies";

/// Measures in a process of its own.
///
/// # Errors
/// There is no such copy at all, or the process fails.
pub fn measure(way: Way, count: usize, library: &Path) -> Result<Taken> {
    let [made, kib, create, destroy] =
        child::measure(MEASURE, [&way.to_string(), &count.to_string()], library)?;
    ensure!(made >= 1.0, "{way}: there is not one copy");
    Ok(Taken { count: made, kib, create, destroy })
}

/// Does what [`measure`] started this process for, and returns whether it did.
///
/// # Errors
/// A copy cannot be made.
pub fn serve() -> Result<bool> {
    let Some((way, count, library)) = child::arguments(MEASURE) else { return Ok(false) };
    let count = count.parse().context("no number of copies")?;
    let library = Path::new(&library);
    let taken = match &*way {
        "instances" => instances(library, count)?,
        "mapped" => mapped(library, count)?,
        "dlmopen" => namespaces(library, count)?,
        // SAFETY: for these ways, `measure` is given what `wasm::compiled` returned.
        "wasmtime" => unsafe { wasm::taken(Way::Wasm, library, count) }?,
        // SAFETY: so it is for this one.
        "wasmtime, pooled" => unsafe { wasm::taken(Way::WasmPool, library, count) }?,
        _ => processes(library, count)?,
    };
    println!("{} {} {} {}", taken.count, taken.kib, taken.create, taken.destroy);
    Ok(true)
}

/// Returns a number of a file of /proc, in KiB.
fn kib(file: &str, field: &str) -> Result<f64> {
    let text = std::fs::read_to_string(file)?;
    let line = text.lines().find(|line| line.starts_with(field));
    let line = line.with_context(|| format!("{file} has no {field}"))?;
    Ok(line.split_whitespace().nth(1).unwrap_or_default().parse()?)
}

/// Private memory of a process with the tables that map it, in KiB.
pub(super) fn private_memory(process: &str) -> Result<f64> {
    let pages = kib(&format!("/proc/{process}/smaps_rollup"), "Private_Dirty:")?;
    Ok(pages + kib(&format!("/proc/{process}/status"), "VmPTE:")?)
}

pub(super) fn each(nanoseconds: u64, count: usize) -> f64 {
    nanoseconds as f64 / 1e3 / count as f64
}

fn instances(library: &Path, count: usize) -> Result<Taken> {
    let library = Library::load(library)?;
    let mut instances: Vec<Instance> = Vec::with_capacity(count);
    let (before, begin) = (private_memory("self")?, thread_cpu_time());
    for _ in 0..count {
        instances.push(library.create()?);
    }
    let create = each(thread_cpu_time() - begin, count);
    let kib = (private_memory("self")? - before) / count as f64;
    let begin = thread_cpu_time();
    drop(instances);
    Ok(Taken { count: count as f64, kib, create, destroy: each(thread_cpu_time() - begin, count) })
}

fn mapped(library: &Path, count: usize) -> Result<Taken> {
    let library = MappedLibrary::load(library)?;
    let mut instances: Vec<MappedInstance> = Vec::with_capacity(count);
    let (before, begin) = (private_memory("self")?, thread_cpu_time());
    for _ in 0..count {
        // SAFETY: nothing uses the instances.
        instances.push(unsafe { library.create() }?);
    }
    let create = each(thread_cpu_time() - begin, count);
    let kib = (private_memory("self")? - before) / count as f64;
    let begin = thread_cpu_time();
    drop(instances);
    Ok(Taken { count: count as f64, kib, create, destroy: each(thread_cpu_time() - begin, count) })
}

fn namespaces(library: &Path, count: usize) -> Result<Taken> {
    let path = CString::new(library.as_os_str().as_bytes())?;
    let mut handles = Vec::with_capacity(count);
    let (before, begin) = (private_memory("self")?, thread_cpu_time());
    while handles.len() < count {
        // SAFETY: loading a library that has no constructors.
        let handle = unsafe { libc::dlmopen(libc::LM_ID_NEWLM, path.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            break;
        }
        handles.push(handle);
    }
    let made = handles.len().max(1);
    let create = each(thread_cpu_time() - begin, made);
    let kib = (private_memory("self")? - before) / made as f64;
    let (count, begin) = (handles.len() as f64, thread_cpu_time());
    for handle in handles {
        // SAFETY: the handle is open, nothing of the library is used any more, and it is closed once.
        unsafe { libc::dlclose(handle) };
    }
    Ok(Taken { count, kib, create, destroy: each(thread_cpu_time() - begin, made) })
}

/// Processor time of children that were waited for, in nanoseconds.
pub(super) fn time_of_children() -> u64 {
    // SAFETY: an `rusage` consists of integers, for which zero is a valid value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the kernel writes one `rusage` to `usage`, which outlives the call.
    unsafe { libc::getrusage(libc::RUSAGE_CHILDREN, &raw mut usage) };
    let nanoseconds = |time: libc::timeval| (time.tv_sec * 1_000_000 + time.tv_usec).unsigned_abs() * 1000;
    nanoseconds(usage.ru_utime) + nanoseconds(usage.ru_stime)
}

/// Each is a fork of a process that has the plain library.
fn processes(library: &Path, count: usize) -> Result<Taken> {
    let path = CString::new(library.as_os_str().as_bytes())?;
    // SAFETY: loading a library that has no constructors.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    ensure!(!handle.is_null(), "cannot load the library");
    let mut ready = [0; 2];
    // SAFETY: the array has room for two descriptors.
    ensure!(unsafe { libc::pipe(ready.as_mut_ptr()) } == 0, "cannot make a pipe");
    let mut children = Vec::with_capacity(count);
    let (mut create, mut memory) = (0, 0.0);
    for _ in 0..count {
        let begin = thread_cpu_time();
        // SAFETY: this process has one thread; the child writes a byte and waits for its end.
        let child = unsafe { libc::fork() };
        ensure!(child >= 0, "cannot fork");
        if child == 0 {
            // SAFETY: this process has one thread; the child makes system calls and waits for its end.
            unsafe {
                // No child outlives the process that measures it.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::write(ready[1], c"x".as_ptr().cast(), 1);
                loop {
                    libc::pause();
                }
            }
        }
        children.push(child);
        create += thread_cpu_time() - begin;
        let mut byte = 0_u8;
        // SAFETY: the kernel writes at most one byte to `byte`, which outlives the call.
        ensure!(unsafe { libc::read(ready[0], (&raw mut byte).cast(), 1) } == 1, "a process has ended");
        create += process_cpu_time(child)?;
        memory += private_memory(&child.to_string())?;
    }
    let mut used = 0;
    for child in &children {
        used += process_cpu_time(*child)?;
    }
    let (begin, before) = (thread_cpu_time(), time_of_children());
    for child in children {
        // SAFETY: it is a child of this process that nobody waited for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
    }
    let end = (thread_cpu_time() - begin) + (time_of_children() - before).saturating_sub(used);
    Ok(Taken {
        count: count as f64,
        kib: memory / count as f64,
        create: each(create, count),
        destroy: each(end, count),
    })
}
