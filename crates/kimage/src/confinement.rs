//! What confines a thread: seccomp filters, `no_new_privs`, and the processors it may run on.
//!
//! A filter was given as a program for the classic BPF machine; the kernel translates it and keeps the original for
//! programs that carry a process elsewhere (`CONFIG_CHECKPOINT_RESTORE`). Filters form a list from the newest to the
//! oldest, which processes share from the point on at which they were forked. Source: Linux `kernel/seccomp.c`.

use crate::error::Result;
use crate::object::Object;
use crate::task::Task;

/// `MAX_INSNS_PER_PATH` of `kernel/seccomp.c` allows fewer.
const MOST_FILTERS: usize = 32 << 10;
/// `BPF_MAXINSNS`.
const MOST_INSTRUCTIONS: u64 = 4096;
/// `sizeof(struct sock_filter)`.
const INSTRUCTION: u64 = 8;
/// `PFA_NO_NEW_PRIVS` of `include/linux/sched.h`.
const NO_NEW_PRIVILEGES: u32 = 0;

/// How seccomp confines a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// 0 not at all, 1 to four system calls, 2 by filters.
    pub mode: u32,
    /// The filters, the newest first.
    pub filters: Vec<SeccompFilter>,
}

/// One filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeccompFilter {
    /// Where the kernel has it: the same for all threads that share it.
    pub address: u64,
    /// The program: `struct sock_filter`s.
    pub program: Vec<u8>,
    /// `SECCOMP_FILTER_FLAG_LOG`.
    pub logs: bool,
    /// Whether another process answers for it (`SECCOMP_FILTER_FLAG_NEW_LISTENER`).
    pub is_listened_to: bool,
}

impl Task<'_> {
    /// Returns the seccomp filters of the process.
    ///
    /// # Errors
    ///
    /// Those of reading; [`Error::Corrupt`](crate::Error::Corrupt) where the kernel has not kept a filter's program.
    pub fn seccomp(&self) -> Result<Seccomp> {
        let task = self.object();
        let mode = if task.has("seccomp.mode") { task.u32("seccomp.mode")? } else { 0 };
        let mut filters = Vec::new();
        let mut next = if mode == 2 { task.pointer("seccomp.filter", "seccomp_filter")? } else { None };
        while let Some(filter) = next {
            if filters.len() >= MOST_FILTERS {
                return Err(filter.corrupt("the list of filters never ends"));
            }
            filters.push(read(filter)?);
            next = filter.pointer("prev", "seccomp_filter")?;
        }
        Ok(Seccomp { mode, filters })
    }

    /// Returns whether it can never gain privileges (`PR_SET_NO_NEW_PRIVS`).
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn no_new_privileges(&self) -> Result<bool> {
        Ok(self.object().u64("atomic_flags")? >> NO_NEW_PRIVILEGES & 1 != 0)
    }

    /// Returns whether it is in a domain of Landlock (`landlock_restrict_self`), which takes rights to files and
    /// ports away.
    ///
    /// Source: Linux `security/landlock/cred.h`. The credentials have a block of bytes, of which each security module has a part.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn has_landlock_domain(&self) -> Result<bool> {
        let task = self.object();
        let kernel = task.kernel();
        let credentials = task.required("cred", "cred")?;
        let (Some(initialized), Some(sizes)) =
            (kernel.symbols().get("landlock_initialized"), kernel.symbols().get("landlock_blob_sizes"))
        else {
            return Ok(false);
        };
        let mut on = [0];
        kernel.read(initialized, &mut on)?;
        if on == [0] || !credentials.has("security") || credentials.u64("security")? == 0 {
            return Ok(false);
        }
        let place = kernel.object("lsm_blob_sizes", sizes)?.u64("lbs_cred")?;
        // Its first member points to the domain.
        Ok(kernel.read_u64(credentials.u64("security")?.wrapping_add(place))? != 0)
    }

    /// The processors it may run on, one bit for each, 64 to a word.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn affinity(&self) -> Result<Vec<u64>> {
        let task = self.object();
        // `cpus_allowed` until 5.2.
        let bytes = task.bytes(if task.has("cpus_mask") { "cpus_mask" } else { "cpus_allowed" })?;
        Ok(bytes.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect())
    }
}

fn read(filter: Object<'_>) -> Result<SeccompFilter> {
    let original = filter.required("prog", "bpf_prog")?.required("orig_prog", "sock_fprog_kern")?;
    let count = original.u64("len")? & 0xffff;
    if count == 0 || count > MOST_INSTRUCTIONS {
        return Err(original.corrupt(format!("a filter of {count} instructions")));
    }
    let mut program = vec![0; usize::try_from(count * INSTRUCTION).unwrap_or(0)];
    filter.kernel().read(original.u64("filter")?, &mut program)?;
    Ok(SeccompFilter {
        address: filter.address(),
        program,
        logs: filter.u32("log")? & 1 != 0,
        is_listened_to: filter.has("notif") && filter.u64("notif")? != 0,
    })
}
