//! System V semaphores and message queues: what a namespace has of them, used or not.
//!
//! Their numbers lead, through a radix tree, to structures that all begin with the same permissions. A long message is
//! cut into pages, of which each begins with a pointer to the next. Source: Linux `ipc/{util,sem,msg,msgutil}.c`.

use crate::error::Result;
use crate::list;
use crate::object::Object;
use crate::task::Task;

const PAGE: u64 = 4096;
/// Where a namespace keeps its semaphores and its queues (`IPC_SEM_IDS`, `IPC_MSG_IDS` of `ipc/util.h`).
const SEMAPHORES: u64 = 0;
const QUEUES: u64 = 1;
/// What is beyond is taken for broken.
const MOST_OBJECTS: usize = 1 << 15;
const MOST_SEMAPHORES: u64 = 32_000;
const LONGEST_MESSAGE: u64 = 1 << 24;
const SLOTS: u64 = 64;

/// What all objects of System V have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpcObject {
    /// The number that programs know it by.
    pub id: i32,
    /// The key that it can be found by; 0 for none.
    pub key: i32,
    /// The user that owns the object.
    pub uid: u32,
    /// The group that owns the object.
    pub gid: u32,
    /// Who may do what with it.
    pub mode: u32,
}

/// A set of semaphores.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Semaphores {
    /// Its number, key, owner, permissions.
    pub object: IpcObject,
    /// What each of them counts.
    pub values: Vec<u16>,
}

/// A queue of messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageQueue {
    /// Its number, key, owner, permissions.
    pub object: IpcObject,
    /// How many bytes it may hold.
    pub room: u64,
    /// The messages in it, each with its type.
    pub messages: Vec<(i64, Vec<u8>)>,
}

impl Task<'_> {
    /// The semaphores of the namespace that it is in.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn semaphores(&self) -> Result<Vec<Semaphores>> {
        objects(self.object(), SEMAPHORES)?.into_iter().map(semaphores).collect()
    }

    /// The message queues of the namespace that it is in.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn message_queues(&self) -> Result<Vec<MessageQueue>> {
        objects(self.object(), QUEUES)?.into_iter().map(queue).collect()
    }

    /// Returns whether the kernel adjusts semaphores when it ends (`SEM_UNDO`).
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn undoes_semaphores(&self) -> Result<bool> {
        let Some(all) = self.object().pointer("sysvsem.undo_list", "sem_undo_list")? else {
            return Ok(false);
        };
        let sets = self.semaphores()?;
        for undo in list::members(all.embedded("list_proc", "list_head")?, "sem_undo", "list_proc").found {
            let id = undo.i32("semid")?;
            let count = sets.iter().find(|set| set.object.id == id).map_or(0, |set| set.values.len());
            let mut changes = vec![0; count * 2];
            // A pointer, or in newer kernels an array at the end.
            let place = match undo.u64("semadj")? {
                0 => undo.address_of("semadj")?,
                place => place,
            };
            undo.kernel().read(place, &mut changes)?;
            if changes.iter().any(|&byte| byte != 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// The permissions of all objects of a kind, which is where their structures begin.
fn objects(task: Object<'_>, kind: u64) -> Result<Vec<Object<'_>>> {
    let kernel = task.kernel();
    let space = task.required("nsproxy", "nsproxy")?.required("ipc_ns", "ipc_namespace")?;
    let all = space.address_of("ids")?.wrapping_add(kind * kernel.types().size("ipc_ids")?);
    let root = kernel.object("ipc_ids", all)?.u64("ipcs_idr.idr_rt.xa_head")?;
    let mut found = Vec::new();
    entries(space, root, None, &mut found)?;
    found.into_iter().map(|address| kernel.object("kern_ipc_perm", address)).collect()
}

/// The pointers in a radix tree; `above` is the shift of the node that leads here.
fn entries(owner: Object<'_>, entry: u64, above: Option<u64>, found: &mut Vec<u64>) -> Result<()> {
    let is_node = entry & 3 == 2 && entry > PAGE;
    if entry & 3 == 0 && entry != 0 {
        found.push(entry);
    }
    if !is_node {
        return Ok(());
    }
    let node = owner.kernel().object("xa_node", entry - 2)?;
    let shift = node.u64("shift")?;
    // Each step down has a lower shift, so that an end is reached.
    if let Some(above) = above.filter(|above| shift >= *above) {
        return Err(node.corrupt(format!("a node of shift {shift} beneath one of {above}")));
    }
    if found.len() > MOST_OBJECTS {
        return Err(node.corrupt(format!("more than {MOST_OBJECTS} objects")));
    }
    let slots = node.address_of("slots")?;
    for slot in 0..SLOTS {
        entries(owner, owner.kernel().read_u64(slots + slot * 8)?, Some(shift), found)?;
    }
    Ok(())
}

fn about(object: Object<'_>) -> Result<IpcObject> {
    Ok(IpcObject {
        id: object.i32("id")?,
        key: object.i32("key")?,
        uid: object.u32("uid.val")?,
        gid: object.u32("gid.val")?,
        mode: object.u32("mode")? & 0o777,
    })
}

fn semaphores(object: Object<'_>) -> Result<Semaphores> {
    let set = object.container("sem_array", "sem_perm")?;
    let (count, size) = (set.u64("sem_nsems")?, object.kernel().types().size("sem")?);
    if count > MOST_SEMAPHORES {
        return Err(set.corrupt(format!("it has {count} semaphores")));
    }
    let first = set.address_of("sems")?;
    let value = |index: u64| -> Result<u16> {
        let one = object.kernel().object("sem", first.wrapping_add(index * size))?;
        let value = one.i32("semval")?;
        u16::try_from(value).map_err(|_| one.corrupt(format!("it counts {value}")))
    };
    Ok(Semaphores { object: about(object)?, values: (0..count).map(value).collect::<Result<_>>()? })
}

fn queue(object: Object<'_>) -> Result<MessageQueue> {
    let queue = object.container("msg_queue", "q_perm")?;
    let walk = list::members(queue.embedded("q_messages", "list_head")?, "msg_msg", "m_list");
    if let Some(problem) = walk.problems.into_iter().next() {
        return Err(problem.error);
    }
    let messages = walk.found.into_iter().map(message).collect::<Result<_>>()?;
    Ok(MessageQueue { object: about(object)?, room: queue.u64("q_qbytes")?, messages })
}

/// A message: what fits into a page with its head, then pages that begin with where the next one is.
fn message(message: Object<'_>) -> Result<(i64, Vec<u8>)> {
    let kernel = message.kernel();
    let (kind, size) = (message.u64("m_type")?.cast_signed(), message.u64("m_ts")?);
    if size > LONGEST_MESSAGE {
        return Err(message.corrupt(format!("it has {size} bytes")));
    }
    let mut bytes = Vec::new();
    let (mut at, mut head) = (message.address(), kernel.types().size("msg_msg")?);
    let mut next = message.u64("next")?;
    loop {
        let left = size - bytes.len() as u64;
        let start = bytes.len();
        bytes.resize(start + usize::try_from(left.min(PAGE - head.min(PAGE))).unwrap_or(0), 0);
        kernel.read(at.wrapping_add(head), &mut bytes[start..])?;
        if bytes.len() as u64 == size {
            return Ok((kind, bytes));
        }
        if next == 0 {
            return Err(message.corrupt(format!("it ends after {} of {size} bytes", bytes.len())));
        }
        (at, head) = (kernel.object("msg_msgseg", next)?.address(), 8);
        next = kernel.read_u64(at)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synthetic::{DIRECT, Machine, Maker};

    #[test]
    fn a_long_message_is_put_together() {
        let mut m = Maker::new();
        let (first, second) = (DIRECT + m.room(PAGE, PAGE), DIRECT + m.room(PAGE, PAGE));
        let text: Vec<u8> = (0..5000_u32).map(|byte| byte.to_le_bytes()[0]).collect();
        for (path, value) in [("m_type", 7), ("m_ts", 5000), ("next", second)] {
            m.set(first, "msg_msg", path, value);
        }
        m.write(first + 48, &text[..4048]);
        m.write(second + 8, &text[4048..]);
        let machine = Machine::of(m);
        let kernel = machine.kernel();
        let found = message(kernel.object("msg_msg", first).unwrap()).unwrap();
        assert_eq!(found, (7, text));
    }

    #[test]
    fn one_that_is_cut_off_is_told() {
        let mut m = Maker::new();
        let first = DIRECT + m.room(PAGE, PAGE);
        m.set(first, "msg_msg", "m_ts", 5000);
        let machine = Machine::of(m);
        let kernel = machine.kernel();
        let error = message(kernel.object("msg_msg", first).unwrap()).unwrap_err().to_string();
        assert!(error.contains("4048 of 5000"), "{error}");
    }
}
