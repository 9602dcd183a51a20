//! In the orbit: the time limit of a call, held by the kernel. A timer whose signal is SIGKILL needs nobody's help: not
//! main's, which may not be waiting, and not the task's, which may be stuck (timer_create(2)).

/// A timer, made when the first call with a limit comes.
#[derive(Debug, Default)]
pub(crate) struct Timer {
    id: Option<libc::timer_t>,
    armed: bool,
}

impl Timer {
    /// Kills this process in `nanoseconds` of real time; 0 stands for never.
    pub(crate) fn arm(&mut self, nanoseconds: u64) {
        if nanoseconds > 0 {
            self.armed = true;
            self.set(nanoseconds);
        }
    }

    /// Lets it live.
    pub(crate) fn disarm(&mut self) {
        if self.armed {
            self.armed = false;
            self.set(0);
        }
    }

    fn set(&mut self, nanoseconds: u64) {
        if self.id.is_none() {
            // SAFETY: all zeros are a valid event; the signal number is the kernel's to deliver.
            let mut event: libc::sigevent = unsafe { core::mem::zeroed() };
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGKILL;
            let mut id: libc::timer_t = core::ptr::null_mut();
            // SAFETY: both pointers lead to locals of the right types.
            if unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) } == 0 {
                self.id = Some(id);
            }
        }
        // Without a timer main's own look at the clock is what is left.
        let Some(id) = self.id else { return };
        let value = libc::timespec {
            tv_sec: i64::try_from(nanoseconds / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: i64::try_from(nanoseconds % 1_000_000_000).unwrap_or(0),
        };
        let spec =
            libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the timer is one that this process made, and the kernel reads one `itimerspec`, which
        // outlives the call.
        unsafe { libc::timer_settime(id, 0, &raw const spec, core::ptr::null_mut()) };
    }
}
