//! System V semaphores and message queues, created with the IDs that they had: `/proc/sys/kernel/sem_next_id` and `msg_next_id`
//! say which ID the next one gets (proc(5); kernels with `CONFIG_CHECKPOINT_RESTORE`).

use std::fs;
use std::io;

use anyhow::{Context as _, Result, ensure};
use orrery_orthros_images::{IpcObject, MessageQueue, RestoreState, SemaphoreSet};

fn check(result: i32, what: &str) -> Result<i32> {
    ensure!(result >= 0, "{what}: {}", io::Error::last_os_error());
    Ok(result)
}

/// Creates all semaphore sets and message queues, and returns remarks about those that are lost.
pub(crate) fn restore(state: &RestoreState) -> Vec<String> {
    let mut remarks = Vec::new();
    for set in &state.semaphores {
        if let Err(error) = create_semaphores(set) {
            remarks.push(format!("the semaphores {} are lost: {error:#}", set.object.id));
        }
    }
    for queue in &state.message_queues {
        if let Err(error) = create_queue(queue) {
            remarks.push(format!("the message queue {} is lost: {error:#}", queue.object.id));
        }
    }
    remarks
}

/// Creates an object with its ID by `create`, which gets the flags of the call.
fn with_id(object: &IpcObject, kind: &str, create: impl FnOnce(i32) -> i32) -> Result<()> {
    let next = format!("/proc/sys/kernel/{kind}_next_id");
    fs::write(&next, object.id.to_string()).with_context(|| format!("cannot write {next}"))?;
    let flags = libc::IPC_CREAT | libc::IPC_EXCL | i32::try_from(object.mode & 0o777)?;
    let id = check(create(flags), "cannot create it")?;
    ensure!(id == object.id, "it got the ID {id}");
    Ok(())
}

fn create_semaphores(set: &SemaphoreSet) -> Result<()> {
    let object = &set.object;
    let count = i32::try_from(set.values.len())?;
    // SAFETY: the call takes numbers only.
    with_id(object, "sem", |flags| unsafe { libc::semget(object.key, count, flags) })?;
    let mut values = set.values.clone();
    // SAFETY: SETALL reads as many values as the set has semaphores, which is `values.len()`.
    check(unsafe { libc::semctl(object.id, 0, libc::SETALL, values.as_mut_ptr()) }, "cannot set its values")?;
    // SAFETY: `semid_ds` has only integer fields, for which zero is valid.
    let mut attributes: libc::semid_ds = unsafe { std::mem::zeroed() };
    check(
        // SAFETY: IPC_STAT writes one `semid_ds`, which `attributes` is.
        unsafe { libc::semctl(object.id, 0, libc::IPC_STAT, &raw mut attributes) },
        "cannot read its attributes",
    )?;
    (attributes.sem_perm.uid, attributes.sem_perm.gid) = (object.uid, object.gid);
    // SAFETY: IPC_SET reads one `semid_ds`, which `attributes` is.
    check(unsafe { libc::semctl(object.id, 0, libc::IPC_SET, &raw mut attributes) }, "cannot set its owner")
        .map(drop)
}

fn create_queue(queue: &MessageQueue) -> Result<()> {
    let object = &queue.object;
    // SAFETY: the call takes numbers only.
    with_id(object, "msg", |flags| unsafe { libc::msgget(object.key, flags) })?;
    // SAFETY: `msqid_ds` has only integer fields, for which zero is valid.
    let mut attributes: libc::msqid_ds = unsafe { std::mem::zeroed() };
    check(
        // SAFETY: IPC_STAT writes one `msqid_ds`, which `attributes` is.
        unsafe { libc::msgctl(object.id, libc::IPC_STAT, &raw mut attributes) },
        "cannot read its attributes",
    )?;
    attributes.msg_qbytes = queue.capacity;
    (attributes.msg_perm.uid, attributes.msg_perm.gid) = (object.uid, object.gid);
    // SAFETY: IPC_SET reads one `msqid_ds`, which `attributes` is.
    check(unsafe { libc::msgctl(object.id, libc::IPC_SET, &raw mut attributes) }, "cannot set its capacity")?;
    for (kind, bytes) in &queue.messages {
        let message = [&kind.to_le_bytes()[..], bytes].concat();
        // SAFETY: `message` is a `long` followed by `bytes.len()` bytes, which is what msgsnd reads.
        let sent = unsafe { libc::msgsnd(object.id, message.as_ptr().cast(), bytes.len(), libc::IPC_NOWAIT) };
        check(sent, "cannot send a message")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restored_objects_have_their_ids_and_contents() {
        // IDs that nobody has: allocated and freed again.
        // SAFETY: the only pointer is the null that IPC_RMID ignores.
        let (set, queue) = unsafe {
            let set = libc::semget(libc::IPC_PRIVATE, 3, 0o600);
            let queue = libc::msgget(libc::IPC_PRIVATE, 0o600);
            libc::semctl(set, 0, libc::IPC_RMID);
            libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut());
            (set, queue)
        };
        let object = |id| IpcObject { id, key: 0, uid: 1, gid: 2, mode: 0o640 };
        let messages = vec![(7, b"first".to_vec()), (9, vec![3; 6000])];
        let state = RestoreState {
            semaphores: vec![SemaphoreSet { object: object(set), values: vec![5, 0, 7] }],
            message_queues: vec![MessageQueue {
                object: object(queue),
                capacity: 16_000,
                messages: messages.clone(),
            }],
            ..RestoreState::default()
        };
        let remarks = restore(&state);
        if set < 0 || queue < 0 || remarks.iter().any(|remark| remark.contains("next_id")) {
            orrery_testing::skipped!("no System V objects of given numbers here: {remarks:?}");
            return;
        }
        assert!(remarks.is_empty(), "{remarks:?}");
        let mut values = [0_u16; 3];
        let mut message = [0_u8; 8 + 8192];
        // SAFETY: `values` has room for three semaphores, `message` for a type and 8192 bytes, as much as the
        // calls may write.
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
