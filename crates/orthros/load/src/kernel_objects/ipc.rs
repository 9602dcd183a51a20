//! Semaphores and a message queue of System V, under numbers that a program only remembers.

use std::io;

use anyhow::{Result, ensure};

const VALUES: [u16; 3] = [5, 0, 7];
/// One message in a page, and one in two.
const SHORT: &[u8] = b"a message";
const LONG: usize = 6000;

pub(super) struct SystemV {
    set: i32,
    queue: i32,
}

fn check(result: i64, what: &str) -> Result<i64> {
    ensure!(result >= 0, "{what}: {}", io::Error::last_os_error());
    Ok(result)
}

impl SystemV {
    pub(super) fn take() -> Result<Self> {
        // SAFETY: the calls take numbers only: IPC_RMID has no fourth argument.
        let (set, queue) = unsafe {
            // Numbers that are taken first and returned make those that stay other than the first ones.
            let first = libc::semget(libc::IPC_PRIVATE, 1, 0o600);
            let set = libc::semget(libc::IPC_PRIVATE, i32::try_from(VALUES.len())?, 0o600);
            libc::semctl(first, 0, libc::IPC_RMID);
            (set, libc::msgget(4711, libc::IPC_CREAT | 0o600))
        };
        check(i64::from(set), "semaphores")?;
        check(i64::from(queue), "a message queue")?;
        let mut values = VALUES;
        // SAFETY: there are as many values as semaphores.
        check(i64::from(unsafe { libc::semctl(set, 0, libc::SETALL, values.as_mut_ptr()) }), "semaphores")?;
        Ok(Self { set, queue })
    }

    /// Leaves messages on their way.
    pub(super) fn prepare(&self) -> Result<()> {
        for (kind, bytes) in [(7_i64, SHORT), (9, &[3; LONG])] {
            let message = [&kind.to_le_bytes()[..], bytes].concat();
            // SAFETY: the message is its type and as many bytes as are told.
            let sent =
                unsafe { libc::msgsnd(self.queue, message.as_ptr().cast(), bytes.len(), libc::IPC_NOWAIT) };
            check(i64::from(sent), "a message")?;
        }
        Ok(())
    }

    /// Whether everything is as it was left.
    pub(super) fn look(&self) -> Result<()> {
        let mut values = [0; VALUES.len()];
        // SAFETY: there is room for the values of all semaphores.
        let got = unsafe { libc::semctl(self.set, 0, libc::GETALL, values.as_mut_ptr()) };
        check(i64::from(got), "semaphores")?;
        ensure!(values == VALUES, "semaphores count {values:?}");
        // SAFETY: the call takes numbers only.
        let queue = unsafe { libc::msgget(4711, 0) };
        ensure!(queue == self.queue, "the key leads to the queue {queue}, not {}", self.queue);
        let mut message = vec![0_u8; 8 + 8192];
        for (kind, bytes) in [(7_i64, SHORT), (9, &[3; LONG])] {
            // SAFETY: there is room for the message and its type.
            let count = unsafe {
                libc::msgrcv(self.queue, message.as_mut_ptr().cast(), 8192, kind, libc::IPC_NOWAIT)
            };
            let count = usize::try_from(check(i64::try_from(count)?, "a message")?)?;
            ensure!(message[8..8 + count] == *bytes, "message {kind} has {count} other bytes");
        }
        Ok(())
    }
}
