//! A vault: a secret that lives in a context of its own, with what may be done with it.
//!
//! ```standalone_crate
//! use orrery_vault::Vault;
//!
//! let load = || Ok::<_, std::io::Error>(b"the key".to_vec());
//! let sum = |key: &mut Vec<u8>, data: &[u8]| vec![key.iter().chain(data).fold(0_u8, |a, b| a.wrapping_add(*b))];
//! let mut vault = Vault::new(load, sum)?;
//! assert_eq!(vault.call(b"data")?.len(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Algorithm 3 of the paper, turned around: there, the program loads the secret, copies itself into the vault, and
//! erases its own copy; here the secret is loaded *inside*, so the program never had it. Data go in and results come
//! out as copies; neither side maps the other's memory.
//!
//! # Who cannot read it
//!
//! The vault is a process with memory of its own, closed to debuggers (`PR_SET_DUMPABLE` in prctl(2)) before the secret
//! is loaded. It leaves no core. Every right of the creator to overlay its memory is given up before, too. A program of
//! an ordinary user, even one in the hands of an attacker, cannot read it: not by pointer, ptrace(2),
//! process_vm_readv(2), `/proc/PID/mem`, or pidfd_getfd(2).
//!
//! # Who can
//!
//! The superuser, that is, whoever has CAP_SYS_PTRACE over the vault's process: **a program that runs as root must drop
//! that before it meets an attacker**, as servers do when they change their user. Whoever can load code into the
//! kernel. And nothing keeps a secret that `load` reads from a file secret, if the attacker can open that file: make it
//! readable by root only, make the vault, then drop privileges. What `serve` answers is up to it: a vault that signs
//! will sign for an attacker, too. Memory of a
//! [`Vault`] may be swapped out, unless the machine's swap is encrypted or off; [`shared::SharedVault::is_locked`] returns
//! whether that of a shared one may be.
//!
//! # Servers
//!
//! Such a vault belongs to one thread of one process. One that all processes of a forking server share is in
//! [`shared`].

mod call_buffer;
mod client;
mod closed;
mod connection;
mod connections;
#[doc(hidden)]
pub mod fuzzing;
mod message;
pub mod shared;
mod supervisor;

use std::fmt::Display;

use rustix::process::Pid;

use orrery_context::{self as context, Context, Error, Spec};

/// A secret and its keeper; dropping it ends both.
#[derive(Debug)]
pub struct Vault {
    context: Context,
    pid: Pid,
}

/// Why there is no vault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NoVault {
    /// Its context could not be made, or did not live.
    #[error(transparent)]
    Context(#[from] Error),
    /// Its secret could not be loaded.
    #[error("the vault's secret cannot be loaded: {0}")]
    Load(String),
}

/// The functions of a [vault of servers](shared), which run in the vault, with the secrets that they keep.
///
/// They answer by writing into `answer` and telling how many bytes. A function that panics ends its process: a twin is
/// replaced then, and for a keeper its spare takes over.
pub trait VaultService {
    /// Loads what `request` says. The keeper calls it, one request at a time; twins that exist do not learn of it, but
    /// clients then ask for new ones by themselves.
    ///
    /// # Errors
    /// Whatever the caller is to be told.
    fn load(&mut self, request: &[u8], answer: &mut [u8]) -> std::result::Result<usize, rustix::io::Errno>;

    /// Returns what [`VaultService::load`] does in the keeper, beside computing. Nothing else is possible there.
    fn loads(&self) -> Loads {
        Loads::Files
    }

    /// Serves a call, in a twin. What it changes here is seen by later calls of the same client, perhaps.
    ///
    /// # Errors
    /// Whatever the caller is to be told.
    fn serve(&mut self, request: &[u8], answer: &mut [u8]) -> std::result::Result<usize, rustix::io::Errno>;

    /// Drops what is not wanted any more. The keeper calls it whenever it is about to sleep, and then after the time
    /// that it returned, if any. Zero says that something was dropped: the spare, which has it, too, is made again, and
    /// this is called again. Twins keep what they have.
    fn tidy(&mut self) -> Option<std::time::Duration> {
        None
    }
}

/// What the keeper of a [vault of servers](shared) needs to be able to do when it loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Loads {
    /// It opens files for reading, all files where the vault's user is the superuser. Other system calls that lead out of
    /// the process fail with EPERM: writing to files, sockets, programs, signals.
    #[default]
    Files,
    /// Whatever the vault's user may do, with all its capabilities. An attacker who finds a hole in the keeper may do so,
    /// too.
    Anything,
}

/// What the vault says when it has tried to load.
const LOADED: u64 = 1;

impl Vault {
    /// Makes a vault. There, `load` gets the secret, and `serve` answers calls with it.
    ///
    /// Should `serve` panic, the vault dies, and the secret with it.
    ///
    /// # Errors
    /// [`NoVault::Load`] with what `load` said; [`NoVault::Context`].
    pub fn new<S, E: Display>(
        load: impl FnOnce() -> Result<S, E>,
        mut serve: impl FnMut(&mut S, &[u8]) -> Vec<u8>,
    ) -> Result<Self, NoVault> {
        let context = context::create(&Spec::new().alone(true), move |start| {
            leave_no_core();
            let me = u64::from(std::process::id());
            let (mut secret, mut call) = match load() {
                Ok(secret) => (secret, start.creator.switch(LOADED, &me.to_ne_bytes())),
                Err(error) => {
                    let text = error.to_string();
                    let _ = start.creator.switch(0, cut(text.as_bytes()));
                    context::kill_self()
                }
            };
            loop {
                call = match call {
                    Ok(arrival) => {
                        let answer = serve(&mut secret, &arrival.bytes);
                        let (word, bytes) = if answer.len() > context::ROOM {
                            (answer.len() as u64, &[][..])
                        } else {
                            (0, &answer[..])
                        };
                        arrival.caller.switch(word, bytes)
                    }
                    Err(_) => context::kill_self(),
                };
            }
        })?;
        let made = Self::open(context);
        if made.is_err() {
            let _ = context.close();
        }
        made
    }

    /// Gives up all rights to the vault's memory, then has it load the secret.
    fn open(context: Context) -> Result<Self, NoVault> {
        context.restrict(&[])?;
        let said = context.switch(0, &[])?;
        if said.word != LOADED {
            return Err(NoVault::Load(String::from_utf8_lossy(&said.bytes).into_owned()));
        }
        let number = <[u8; 8]>::try_from(&said.bytes[..]).map_or(0, u64::from_ne_bytes);
        let pid = i32::try_from(number).ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| {
            Error::System(orrery_sys::Error::new("open a vault", 0, rustix::io::Errno::BADMSG))
        })?;
        Ok(Self { context, pid })
    }

    /// Has `serve` work on `input`; gives what it answers.
    ///
    /// # Errors
    /// [`Error::TooLong`] where input or answer have more than [`context::ROOM`] bytes, [`Error::Died`] where the vault
    /// died of this call, [`Error::Gone`] where it did before, and others of [`Context::switch`].
    pub fn call(&mut self, input: &[u8]) -> context::Result<Vec<u8>> {
        let answer = self.context.switch(0, input)?;
        match usize::try_from(answer.word) {
            Ok(0) => Ok(answer.bytes),
            bytes => Err(Error::TooLong { bytes: bytes.unwrap_or(usize::MAX), room: context::ROOM }),
        }
    }

    /// Returns the vault's context.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Returns the vault's process, as itself told.
    pub fn pid(&self) -> Pid {
        self.pid
    }
}

impl Drop for Vault {
    fn drop(&mut self) {
        // In a context made since, or a forked process, that closes a copy of the descriptor, if there is one.
        let _ = self.context.close();
    }
}

/// In a vault: no picture of its memory is ever written down.
fn leave_no_core() {
    let none = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    let _ = rustix::process::setrlimit(rustix::process::Resource::Core, none);
}

fn cut(text: &[u8]) -> &[u8] {
    &text[..text.len().min(context::ROOM)]
}
