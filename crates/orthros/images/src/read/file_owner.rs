//! Who gets a signal when an open file is ready: `F_SETOWN` and `F_SETSIG` of fcntl(2).

use anyhow::Result;
use orrery_kimage::{Object, OpenFile};

use crate::model::{FileOwner, Holder};

/// The deepest nesting of PID namespaces.
const DEEPEST: u64 = 32;

/// Reads the receiver and the signal of an open file; `None` if none was ever set.
pub(super) fn read(file: &OpenFile<'_>) -> Result<Option<FileOwner>> {
    let object = file.object();
    // A member until 6.12, behind a pointer since then.
    let owner = if object.has("f_owner.signum") {
        Some(object.embedded("f_owner", "fown_struct")?)
    } else {
        object.pointer("f_owner", "fown_struct")?
    };
    let Some(owner) = owner else { return Ok(None) };
    let signal = owner.i32("signum")?;
    let receiver = owner.pointer("pid", "pid")?.map(number).transpose()?.unwrap_or(0);
    if signal == 0 && receiver == 0 {
        return Ok(None);
    }
    let uids = (owner.u32("uid")?, owner.u32("euid")?);
    // `enum pid_type` counts as `F_OWNER_*` do.
    Ok(Some(FileOwner { holder: Holder::default(), receiver, kind: owner.i32("pid_type")?, signal, uids }))
}

/// Returns the innermost of a PID's numbers.
fn number(pid: Object<'_>) -> Result<i32> {
    let level = u64::from(pid.u32("level")?).min(DEEPEST);
    let size = pid.kernel().types().size("upid")?;
    Ok(pid.kernel().object("upid", pid.address_of("numbers")?.wrapping_add(level * size))?.i32("nr")?)
}
