//! Tasks: every thread of every process, who it is, and whose child.

use std::collections::HashSet;

use crate::error::{Error, Result, Walk};
use crate::kernel::Kernel;
use crate::list;
use crate::object::Object;

/// Kernels number tasks up to 2^22.
const LARGEST_PID: u64 = 1 << 22;

/// A thread.
#[derive(Clone, Copy, Debug)]
pub struct Task<'k> {
    object: Object<'k>,
}

/// Which of a task's numbers is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdKind {
    /// The thread's own.
    Thread,
    /// The ID of the process.
    Process,
    /// The ID of the process group.
    Group,
    /// The ID of the session.
    Session,
}

/// What a task is doing, as `ps` abbreviates it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// On a CPU or waiting for one.
    Running,
    /// Sleeping until something happens or a signal comes.
    Sleeping,
    /// Sleeping, and no signal wakes it.
    Uninterruptible,
    /// A kernel thread with nothing to do.
    Idle,
    /// Stopped by a signal.
    Stopped,
    /// Stopped by a debugger.
    Traced,
    /// Ended, and its parent has not asked how.
    Zombie,
    /// Ended and about to vanish.
    Dead,
}

impl State {
    /// Returns the letter of `ps`.
    #[must_use]
    pub fn letter(self) -> char {
        match self {
            Self::Running => 'R',
            Self::Sleeping => 'S',
            Self::Uninterruptible => 'D',
            Self::Idle => 'I',
            Self::Stopped => 'T',
            Self::Traced => 't',
            Self::Zombie => 'Z',
            Self::Dead => 'X',
        }
    }
}

impl Kernel {
    /// Every process: one task each, the one that leads its threads. Without the idle task, by ascending number.
    ///
    /// A task that contradicts itself is left out and reported; the list is followed from both ends.
    pub fn processes(&self) -> Walk<Task<'_>> {
        let mut walk = Walk::default();
        let head =
            match self.variable("init_task", "task_struct").and_then(|t| t.embedded("tasks", "list_head")) {
                Ok(head) => head,
                Err(error) => {
                    walk.note("the first task".to_owned(), error);
                    return walk;
                }
            };
        let all = list::members(head, "task_struct", "tasks");
        walk.problems = all.problems;
        for object in all.found {
            walk.take(|| format!("the task at {:#x}", object.address()), Task::check(object));
        }
        walk.found.sort_by_key(|task| task.pid().unwrap_or(0));
        walk
    }

    /// Returns the process of this number.
    ///
    /// # Errors
    ///
    /// [`Error::NoProcess`].
    pub fn process(&self, pid: i32) -> Result<Task<'_>> {
        let mut all = self.processes().found.into_iter();
        all.find(|task| task.pid().is_ok_and(|found| found == pid)).ok_or(Error::NoProcess(pid))
    }
}

impl<'k> Task<'k> {
    /// Takes an object for a task only if it looks like one.
    pub(crate) fn check(object: Object<'k>) -> Result<Self> {
        for path in ["pid", "tgid"] {
            let id = u64::from(object.u32(path)?);
            if id > LARGEST_PID {
                return Err(object.corrupt(format!("its {path} would be {id}")));
            }
        }
        object.required("signal", "signal_struct").or_else(|error| {
            // A zombie that is being reaped may have lost it.
            if object.i32("exit_state")? != 0 { Ok(object) } else { Err(error) }
        })?;
        Ok(Self { object })
    }

    /// Returns its `task_struct`.
    #[must_use]
    pub fn object(&self) -> Object<'k> {
        self.object
    }

    /// Returns the number of its process, in the outermost PID namespace.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn pid(&self) -> Result<i32> {
        self.object.i32("tgid")
    }

    /// Returns its own number, in the outermost PID namespace.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn tid(&self) -> Result<i32> {
        self.object.i32("pid")
    }

    /// Its numbers from the outermost PID namespace to its own, where the last is what it sees itself.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`] where it would be nested deeper than kernels allow.
    pub fn ids(&self, kind: IdKind) -> Result<Vec<i32>> {
        let signal = || self.object.required("signal", "signal_struct");
        let of_signal = |constant, fallback: u64| -> Result<Option<Object<'k>>> {
            let signal = signal()?;
            let index = self.object.kernel().types().constant("pid_type", constant).unwrap_or(fallback);
            let address =
                self.object.kernel().read_u64(signal.address_of("pids")?.wrapping_add(index * 8))?;
            if address == 0 { Ok(None) } else { self.object.kernel().object("pid", address).map(Some) }
        };
        let pid = match kind {
            IdKind::Thread => self.object.pointer("thread_pid", "pid")?,
            IdKind::Process => of_signal("PIDTYPE_TGID", 1)?,
            IdKind::Group => of_signal("PIDTYPE_PGID", 2)?,
            IdKind::Session => of_signal("PIDTYPE_SID", 3)?,
        };
        let Some(pid) = pid else { return Ok(Vec::new()) };
        let level = u64::from(pid.u32("level")?);
        if level > 32 {
            return Err(pid.corrupt(format!("nested {level} deep")));
        }
        let size = self.object.kernel().types().size("upid")?;
        let first = pid.address_of("numbers")?;
        (0..=level)
            .map(|index| self.object.kernel().object("upid", first.wrapping_add(index * size))?.i32("nr"))
            .collect()
    }

    /// The number of the process that is its parent.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn parent(&self) -> Result<i32> {
        self.object.required("real_parent", "task_struct")?.i32("tgid")
    }

    /// Returns the name of its program, at most 15 bytes.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn name(&self) -> Result<String> {
        self.object.text("comm")
    }

    /// Returns what it is doing.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn state(&self) -> Result<State> {
        // `__state` since 5.14, `state` before.
        let state = if self.object.has("__state") {
            self.object.u32("__state")?
        } else {
            self.object.u32("state")?
        };
        let exit = self.object.u32("exit_state")?;
        Ok(match (exit, state) {
            (exit, _) if exit & 0x20 != 0 => State::Zombie,
            (exit, _) if exit & 0x10 != 0 => State::Dead,
            (_, state) if state & 0x402 == 0x402 => State::Idle,
            (_, state) if state & 0x1 != 0 => State::Sleeping,
            (_, state) if state & 0x2 != 0 => State::Uninterruptible,
            (_, state) if state & 0x8 != 0 => State::Traced,
            (_, state) if state & 0x4 != 0 => State::Stopped,
            _ => State::Running,
        })
    }

    /// Returns all threads of its process, its leader first.
    pub fn threads(&self) -> Walk<Self> {
        let mut walk = Walk::default();
        let head = self
            .object
            .required("signal", "signal_struct")
            .and_then(|signal| signal.embedded("thread_head", "list_head"));
        let head = match head {
            Ok(head) => head,
            Err(error) => {
                walk.note(format!("the threads of the task at {:#x}", self.object.address()), error);
                walk.found.push(*self);
                return walk;
            }
        };
        let all = list::members(head, "task_struct", "thread_node");
        walk.problems = all.problems;
        for object in all.found {
            walk.take(|| format!("the thread at {:#x}", object.address()), Self::check(object));
        }
        walk
    }

    /// Its children that live, or that it has not asked about yet.
    pub fn children(&self) -> Walk<Self> {
        let mut walk = Walk::default();
        let mut seen = HashSet::new();
        for thread in self.threads().found {
            let Ok(head) = thread.object.embedded("children", "list_head") else { continue };
            let all = list::members(head, "task_struct", "sibling");
            walk.problems.extend(all.problems);
            for object in all.found.into_iter().filter(|object| seen.insert(object.address())) {
                walk.take(|| format!("the child at {:#x}", object.address()), Self::check(object));
            }
        }
        walk
    }

    /// Returns the credentials of the task.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn credentials(&self) -> Result<Credentials> {
        let cred = self.object.required("cred", "cred")?;
        let mut groups = Vec::new();
        if let Some(info) = cred.pointer("group_info", "group_info")? {
            let count = info.u32("ngroups")?;
            if count > 65_536 {
                return Err(info.corrupt(format!("{count} groups")));
            }
            let mut bytes = vec![0; count as usize * 4];
            self.object.kernel().read(info.address_of("gid")?, &mut bytes)?;
            groups = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        }
        Ok(Credentials {
            uid: cred.u32("uid.val")?,
            gid: cred.u32("gid.val")?,
            effective_uid: cred.u32("euid.val")?,
            effective_gid: cred.u32("egid.val")?,
            saved_uid: cred.u32("suid.val")?,
            saved_gid: cred.u32("sgid.val")?,
            file_uid: cred.u32("fsuid.val")?,
            file_gid: cred.u32("fsgid.val")?,
            groups,
            // One number since 6.3, an array of two halves before: the same bytes.
            inheritable: cred.u64("cap_inheritable")?,
            permitted: cred.u64("cap_permitted")?,
            effective: cred.u64("cap_effective")?,
            bounding: cred.u64("cap_bset")?,
            ambient: cred.u64("cap_ambient")?,
            secure_bits: cred.u32("securebits")?,
        })
    }
}

/// Who a task acts as, in the outermost user namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it, and capabilities(7) and credentials(7) the rest")]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub effective_uid: u32,
    pub effective_gid: u32,
    pub saved_uid: u32,
    pub saved_gid: u32,
    pub file_uid: u32,
    pub file_gid: u32,
    pub groups: Vec<u32>,
    pub inheritable: u64,
    pub permitted: u64,
    pub effective: u64,
    pub bounding: u64,
    pub ambient: u64,
    pub secure_bits: u32,
}
