//! System V semaphores and message queues, made again under the same numbers: `/proc/sys/kernel/sem_next_id` and
//! `msg_next_id` say which number the next one gets (proc(5); kernels with `CONFIG_CHECKPOINT_RESTORE`).

use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use orrery_kimage::{IpcObject, MessageQueue, Semaphores, Task};
use serde::{Deserialize, Serialize};

const IMAGE: &str = "ipc.json";

/// What there was, whoever used it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Ipc {
    semaphores: Vec<(Object, Vec<u16>)>,
    queues: Vec<(Object, u64, Vec<Message>)>,
}

/// Its type, and its bytes.
type Message = (i64, Vec<u8>);

#[derive(Debug, Serialize, Deserialize)]
struct Object {
    id: i32,
    key: i32,
    uid: u32,
    gid: u32,
    mode: u32,
}

impl From<IpcObject> for Object {
    fn from(IpcObject { id, key, uid, gid, mode }: IpcObject) -> Self {
        Self { id, key, uid, gid, mode }
    }
}

fn check(result: i32, what: &str) -> Result<i32> {
    ensure!(result >= 0, "{what}: {}", io::Error::last_os_error());
    Ok(result)
}

impl Ipc {
    /// What the namespace of the service has.
    pub(crate) fn of(process: &Task<'_>) -> Result<Self> {
        let semaphores = process.semaphores().context("semaphores")?.into_iter();
        let queues = process.message_queues().context("message queues")?.into_iter();
        Ok(Self {
            semaphores: semaphores.map(|Semaphores { object, values }| (object.into(), values)).collect(),
            queues: queues
                .map(|MessageQueue { object, room, messages }| (object.into(), room, messages))
                .collect(),
        })
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        fs::write(folder.join(IMAGE), serde_json::to_vec(self)?).context("cannot write semaphores and queues")
    }

    pub(crate) fn read(folder: &Path) -> Result<Self> {
        let bytes = fs::read(folder.join(IMAGE)).context("cannot read semaphores and queues")?;
        serde_json::from_slice(&bytes).context("cannot read semaphores and queues")
    }

    /// Makes all of them; what does not work is told in words.
    pub(crate) fn restore(&self) -> Vec<String> {
        let mut remarks = Vec::new();
        for (object, values) in &self.semaphores {
            if let Err(error) = object.semaphores(values) {
                remarks.push(format!("the semaphores {} are lost: {error:#}", object.id));
            }
        }
        for (object, room, messages) in &self.queues {
            if let Err(error) = object.queue(*room, messages) {
                remarks.push(format!("the message queue {} is lost: {error:#}", object.id));
            }
        }
        remarks
    }
}

impl Object {
    /// Makes an object of its number by `make`, which gets flags.
    fn make(&self, kind: &str, make: impl FnOnce(i32) -> i32) -> Result<()> {
        let next = format!("/proc/sys/kernel/{kind}_next_id");
        fs::write(&next, self.id.to_string()).with_context(|| format!("cannot write {next}"))?;
        let flags = libc::IPC_CREAT | libc::IPC_EXCL | i32::try_from(self.mode & 0o777)?;
        let id = check(make(flags), "cannot make it")?;
        ensure!(id == self.id, "it got the number {id}");
        Ok(())
    }

    fn semaphores(&self, values: &[u16]) -> Result<()> {
        let count = i32::try_from(values.len())?;
        // SAFETY: no pointers are involved.
        self.make("sem", |flags| unsafe { libc::semget(self.key, count, flags) })?;
        let mut values = values.to_vec();
        // SAFETY: there are as many values as semaphores.
        check(unsafe { libc::semctl(self.id, 0, libc::SETALL, values.as_mut_ptr()) }, "cannot set them")?;
        // SAFETY: zeros are a description, which the call fills in.
        let mut about: libc::semid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the description is writable.
        check(unsafe { libc::semctl(self.id, 0, libc::IPC_STAT, &raw mut about) }, "cannot look")?;
        (about.sem_perm.uid, about.sem_perm.gid) = (self.uid, self.gid);
        // SAFETY: as above.
        check(unsafe { libc::semctl(self.id, 0, libc::IPC_SET, &raw mut about) }, "its owner").map(drop)
    }

    fn queue(&self, room: u64, messages: &[Message]) -> Result<()> {
        // SAFETY: no pointers are involved.
        self.make("msg", |flags| unsafe { libc::msgget(self.key, flags) })?;
        // SAFETY: zeros are a description, which the call fills in.
        let mut about: libc::msqid_ds = unsafe { std::mem::zeroed() };
        // SAFETY: the description is writable.
        check(unsafe { libc::msgctl(self.id, libc::IPC_STAT, &raw mut about) }, "cannot look")?;
        about.msg_qbytes = room;
        (about.msg_perm.uid, about.msg_perm.gid) = (self.uid, self.gid);
        // SAFETY: as above.
        check(unsafe { libc::msgctl(self.id, libc::IPC_SET, &raw mut about) }, "its room")?;
        for (kind, bytes) in messages {
            let message = [&kind.to_le_bytes()[..], bytes].concat();
            // SAFETY: the message is its type and as many bytes as are told.
            let sent =
                unsafe { libc::msgsnd(self.id, message.as_ptr().cast(), bytes.len(), libc::IPC_NOWAIT) };
            check(sent, "a message")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_made_again_has_its_number_and_holds_what_it_held() {
        // Numbers that nobody has: taken and given back.
        // SAFETY: no pointers are involved but a null.
        let (set, queue) = unsafe {
            let set = libc::semget(libc::IPC_PRIVATE, 3, 0o600);
            let queue = libc::msgget(libc::IPC_PRIVATE, 0o600);
            libc::semctl(set, 0, libc::IPC_RMID);
            libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut());
            (set, queue)
        };
        let object = |id| Object { id, key: 0, uid: 1, gid: 2, mode: 0o640 };
        let messages = vec![(7, b"first".to_vec()), (9, vec![3; 6000])];
        let ipc = Ipc {
            semaphores: vec![(object(set), vec![5, 0, 7])],
            queues: vec![(object(queue), 16_000, messages.clone())],
        };
        let remarks = ipc.restore();
        if set < 0 || queue < 0 || remarks.iter().any(|remark| remark.contains("next_id")) {
            orrery_testing::skipped!("no System V objects of given numbers here: {remarks:?}");
            return;
        }
        assert!(remarks.is_empty(), "{remarks:?}");
        let mut values = [0_u16; 3];
        let mut message = [0_u8; 8 + 8192];
        // SAFETY: all places are large enough for what is read into them.
        unsafe {
            assert_eq!(libc::semctl(set, 0, libc::GETALL, values.as_mut_ptr()), 0);
            for (kind, bytes) in &messages {
                let count = libc::msgrcv(queue, message.as_mut_ptr().cast(), 8192, 0, libc::IPC_NOWAIT);
                assert_eq!(usize::try_from(count).unwrap(), bytes.len());
                assert_eq!(message[..8], kind.to_le_bytes());
                assert_eq!(message[8..8 + bytes.len()], bytes[..]);
            }
            libc::semctl(set, 0, libc::IPC_RMID);
            libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut());
        }
        assert_eq!(values, [5, 0, 7]);
    }
}
