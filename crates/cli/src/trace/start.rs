//! How a traced program is started: with other variables (`-E`), as another user (`-u`).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt as _;

use anyhow::{Context as _, bail};
use orrery_hijack::{Child, Hijack};
use rustix::process::{Gid, Uid};

/// What is changed between fork and exec.
#[derive(Debug, Default)]
pub(super) struct Start {
    /// Variables to set, and those without a value to remove.
    environment: Vec<(OsString, Option<OsString>)>,
    user: Option<User>,
}

/// Whom the program acts as.
#[derive(Debug)]
struct User {
    uid: Uid,
    gid: Gid,
    groups: Vec<Gid>,
}

impl Start {
    /// Reads the arguments of `-E` and `-u`.
    ///
    /// # Errors
    /// A variable without a name, a user whom this machine does not know.
    pub(super) fn new(environment: &[OsString], user: Option<&str>) -> anyhow::Result<Self> {
        Ok(Self {
            environment: environment.iter().map(|text| variable(text)).collect::<anyhow::Result<_>>()?,
            user: user.map(find).transpose()?,
        })
    }

    /// Starts a program under an executive.
    ///
    /// # Errors
    /// Those of [`Hijack::spawn`]; that this process may not become the user.
    pub(super) fn spawn(&self, hijack: &Hijack, program: &OsStr, rest: &[OsString]) -> anyhow::Result<Child> {
        if self.user.is_some() && !rustix::process::geteuid().is_root() {
            bail!("cannot run a program as another user (-u): only root may");
        }
        // SAFETY: the child has one thread, in which nothing else uses variables, users or groups.
        Ok(unsafe { hijack.spawn_prepared(program, rest, || self.apply()) }?)
    }

    /// Makes the changes in the child.
    fn apply(&self) -> io::Result<()> {
        for (name, value) in &self.environment {
            // SAFETY: this process has one thread.
            unsafe {
                match value {
                    Some(value) => std::env::set_var(name, value),
                    None => std::env::remove_var(name),
                }
            }
        }
        if let Some(User { uid, gid, groups }) = &self.user {
            rustix::thread::set_thread_groups(groups)?;
            rustix::thread::set_thread_res_gid(*gid, *gid, *gid)?;
            rustix::thread::set_thread_res_uid(*uid, *uid, *uid)?;
        }
        Ok(())
    }
}

/// Reads `NAME=VALUE`, or `NAME`.
fn variable(text: &OsStr) -> anyhow::Result<(OsString, Option<OsString>)> {
    let bytes = text.as_bytes();
    let (name, value) = match bytes.iter().position(|byte| *byte == b'=') {
        Some(at) => (&bytes[..at], Some(OsStr::from_bytes(&bytes[at + 1..]).to_owned())),
        None => (bytes, None),
    };
    if name.is_empty() {
        bail!(
            "cannot set {:?} (-E): a variable has a name before the equals sign",
            text.display().to_string()
        );
    }
    Ok((OsStr::from_bytes(name).to_owned(), value))
}

/// Finds a user by name, or by number.
fn find(who: &str) -> anyhow::Result<User> {
    let number = who.parse().ok();
    let found = uzers::get_user_by_name(who).or_else(|| uzers::get_user_by_uid(number?));
    let found =
        found.with_context(|| format!("cannot run a program as {who} (-u): there is no such user"))?;
    let groups = uzers::get_user_groups(found.name(), found.primary_group_id()).unwrap_or_default();
    Ok(User {
        uid: Uid::from_raw(found.uid()),
        gid: Gid::from_raw(found.primary_group_id()),
        groups: groups.iter().map(|group| Gid::from_raw(group.gid())).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_set_or_removed() {
        let read = |text: &str| variable(OsStr::new(text)).ok();
        let expected = |name: &str, value: Option<&str>| Some((name.into(), value.map(Into::into)));
        assert_eq!(read("A=b=c"), expected("A", Some("b=c")));
        assert_eq!(read("A="), expected("A", Some("")));
        assert_eq!(read("A"), expected("A", None));
        assert_eq!((read("=b"), read("")), (None, None));
    }

    #[test]
    fn users_are_found_by_name_and_number() {
        let root = find("root").unwrap();
        assert!(root.uid.is_root() && root.groups.contains(&root.gid));
        assert!(find("0").unwrap().uid.is_root());
        assert!(find("no user has this name").is_err());
    }
}
