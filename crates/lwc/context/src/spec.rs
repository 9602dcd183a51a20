//! What a new context has of its creator.

use orrery_sys::PageRange;

use crate::error::{Error, Result};
use crate::memory::ranges::pages;
use crate::syscalls::filter::Calls;

/// What a new context has of its creator.
///
/// By default it has a copy of all memory (copy-on-write), all descriptors and all credentials, no right to its
/// creator's memory, deaf ears for signals that are not its own doing, is closed to debuggers (`PR_SET_DUMPABLE` in
/// prctl(2)), and isolated from processes outside ([`Spec::isolate`]).
#[derive(Clone, Debug, Default)]
pub struct Spec {
    pub(crate) share: Vec<(usize, usize)>,
    pub(crate) unmap: Vec<(usize, usize)>,
    pub(crate) access: Vec<(usize, usize)>,
    pub(crate) close: Vec<(u32, u32)>,
    pub(crate) shares_table: bool,
    pub(crate) shares_credentials: bool,
    pub(crate) shared_signals: bool,
    pub(crate) dumpable: bool,
    pub(crate) withheld: Calls,
    pub(crate) trap: bool,
    pub(crate) callable: Calls,
    pub(crate) fetchable: Vec<(u32, u32)>,
    /// Whether it is isolated; unless said otherwise, if its creator is not.
    pub(crate) isolated: Option<bool>,
    pub(crate) alone: bool,
    pub(crate) stays_behind: bool,
}

impl Spec {
    /// Returns the default.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The `length` bytes from `start` on are one memory in both contexts (`LWC_SHARE`), at the same address. Plain
    /// private memory becomes shared; shared mappings of the program's are shared anyway.
    ///
    /// # Safety
    /// What is there may change at every switch: no reference to it may live across one, and what it points to must
    /// mean the same in both contexts. Memory that an allocator hands out has its books elsewhere: map it (mmap(2)).
    #[must_use]
    pub unsafe fn share(mut self, start: *const u8, length: usize) -> Self {
        self.share.push((start.expose_provenance(), length));
        self
    }

    /// The new context does not have the `length` bytes from `start` on (`LWC_UNMAP`). Parts without mappings are fine.
    ///
    /// # Safety
    /// The new context must not use anything there: not its own stack, not code, not what its allocator keeps there.
    #[must_use]
    pub unsafe fn unmap(mut self, start: *const u8, length: usize) -> Self {
        self.unmap.push((start.addr(), length));
        self
    }

    /// The new context may overlay the `length` bytes of its creator's memory from `start` on (`LWC_MAY_ACCESS`,
    /// `LWC_MAY_OVERLAY`).
    #[must_use]
    pub fn may_access(mut self, start: usize, length: usize) -> Self {
        self.access.push((start, length));
        self
    }

    /// The new context does not have the descriptors `first` to `last` (`LWC_UNMAP`). Its creator's it keeps.
    #[must_use]
    pub fn close_descriptors(mut self, first: u32, last: u32) -> Self {
        self.close.push((first, last));
        self
    }

    /// Sets whether the new context and its creator have one table of descriptors between them (`LWC_SHARE` of all
    /// descriptors), rather than a copy each: what either opens or closes is open or closed in both, at once. A part of
    /// it cannot be shared.
    ///
    /// Both then have all names of contexts that either has, with all rights, and what they live by: share it with whom
    /// you trust with these. A copy of the context ([`fork`](crate::fork),
    /// [`Context::checkpoint`](crate::Context::checkpoint)) has a table of its own.
    #[must_use]
    pub fn share_descriptors(mut self, yes: bool) -> Self {
        self.shares_table = yes;
        self
    }

    /// Sets whether the new context and its creator have the same credentials (`LWC_SHARE` of credentials): who
    /// either becomes by setresuid(2), setresgid(2), setgroups(2) and capset(2), the other is when control next comes
    /// there. What one gives up for good, both have given up.
    ///
    /// One that cannot become who the others are, because those calls are kept from it, ends. So does the program if
    /// that is the root. A copy of the context ([`fork`](crate::fork),
    /// [`Context::checkpoint`](crate::Context::checkpoint)) has credentials of its own.
    #[must_use]
    pub fn share_credentials(mut self, yes: bool) -> Self {
        self.shares_credentials = yes;
        self
    }

    /// Sets whether the new context gets signals that no context caused, if its creator does (`LWC_SHAREDSIGNALS`):
    /// what is sent to the process group at once, what is sent to the program, and so to the root alone, when control
    /// next comes there. For that the handlers that the root has are wrapped when it creates the context.
    #[must_use]
    pub fn shared_signals(mut self, yes: bool) -> Self {
        self.shared_signals = yes;
        self
    }

    /// Sets whether debuggers and other processes of the same user may look into the new context, if they may into
    /// its creator.
    #[must_use]
    pub fn dumpable(mut self, yes: bool) -> Self {
        self.dumpable = yes;
        self
    }

    /// Sets whether the new context is kept from all processes that are not its own or started by it, even from those
    /// of the same user: it can neither signal nor trace them, its creator and the root included, be they open to
    /// debuggers or not, nor reach them by abstract Unix sockets, nor change how they run. No program that it
    /// executes gains privileges (`no_new_privs` in prctl(2)).
    ///
    /// By default it is: contexts that the root creates are each isolated, and what these create shares their domain.
    /// With `true` it has a domain of its own in any case, of which the kernel nests 16. With `false` it is as its
    /// creator is: an attacker who runs code in a context of the root's can then read the root's memory, take its
    /// descriptors, and signal it.
    ///
    /// It takes Landlock's scopes (Linux 6.12): without them [`create`](crate::create) fails with
    /// [`Error::Birth`], unless isolation is left out.
    #[must_use]
    pub fn isolate(mut self, yes: bool) -> Self {
        self.isolated = Some(yes);
        self
    }

    /// The new context may not make these system calls: they fail with EPERM, or are trapped ([`Spec::trap`]). That
    /// holds for all that it starts, too, and no program that it executes gains privileges (`no_new_privs` in
    /// prctl(2)).
    ///
    /// Without what it takes to wait for control and to end itself (futex(2), poll(2), exit(2) and the like) no context
    /// can be, so those stay. io_uring(7) is refused.
    #[must_use]
    pub fn withhold(mut self, calls: &Calls) -> Self {
        self.withheld = calls.or(&self.withheld);
        self
    }

    /// Calls that the new context may not make arrive in its creator (`LWC_SYSTRAP`), by default those of
    /// [`Calls::global`]. See [`Arrival::call`](crate::Arrival::call).
    #[must_use]
    pub fn trap(mut self, yes: bool) -> Self {
        self.trap = yes;
        self
    }

    /// The new context may have copies of its creator's descriptors `first` to `last`
    /// ([`Context::overlay_descriptor`](crate::Context::overlay_descriptor)): `LWC_MAY_ACCESS` for descriptors.
    #[must_use]
    pub fn may_fetch(mut self, first: u32, last: u32) -> Self {
        self.fetchable.push((first, last));
        self
    }

    /// The new context may have its creator make these calls ([`Context::syscall`](crate::Context::syscall)):
    /// `LWC_MAY_ACCESS` for system calls.
    #[must_use]
    pub fn may_call(mut self, calls: &Calls) -> Self {
        self.callable = calls.or(&self.callable);
        self
    }

    /// Sets whether the calling thread is the only one that may ever switch there, and the others are left as they
    /// are. They are held still for the moment of the creation otherwise.
    #[must_use]
    pub fn alone(mut self, yes: bool) -> Self {
        self.alone = yes;
        self
    }

    /// Has a fork of the program copy neither the context nor what it creates. They then have not even a socket in
    /// common.
    #[must_use]
    pub fn stays_behind(mut self) -> Self {
        self.stays_behind = true;
        self
    }

    /// The calls that are taken away.
    pub(crate) fn taken(&self) -> Calls {
        if self.trap && self.withheld.is_empty() { Calls::global() } else { self.withheld }
    }

    /// Returns the same in pages, free of contradictions.
    pub(crate) fn check(&self) -> Result<Checked> {
        let all = |list: &[(usize, usize)]| -> Result<Vec<PageRange>> {
            list.iter().map(|(start, length)| pages(*start, *length)).collect()
        };
        let checked =
            Checked { share: all(&self.share)?, unmap: all(&self.unmap)?, access: all(&self.access)? };
        let treated: Vec<PageRange> = checked.share.iter().chain(&checked.unmap).copied().collect();
        for (index, first) in treated.iter().enumerate() {
            if let Some(second) = treated[index + 1..].iter().find(|second| second.overlaps(*first)) {
                return Err(Error::Overlap { first: first.start, second: second.start });
            }
        }
        if self.shares_table && !self.close.is_empty() {
            let why = "descriptors that are shared are its creator's as well: leave `close_descriptors` out";
            return Err(Error::Unmet { why });
        }
        if self.shares_table && self.trap {
            let why = "a context that shares its creator's descriptors could answer its own calls: leave `trap` out";
            return Err(Error::Unmet { why });
        }
        if let Some((first, last)) = self.close.iter().find(|(first, last)| first > last) {
            let length = (*last as usize).wrapping_sub(*first as usize);
            return Err(Error::Unaligned { start: *first as usize, length });
        }
        Ok(checked)
    }
}

/// A specification in pages.
#[derive(Debug)]
pub(crate) struct Checked {
    pub(crate) share: Vec<PageRange>,
    pub(crate) unmap: Vec<PageRange>,
    pub(crate) access: Vec<PageRange>,
}
