//! The environment variables that have the dynamic loader call the auditor.

use std::ffi::{OsStr, OsString};

/// Returns the value of `LD_AUDIT` with an auditor in it: behind others, as the loader asks for bindings of symbols (`la_symbind` in
/// rtld-audit(7)) only if the first auditor wants them, which ours does not.
#[must_use]
pub fn audit_list(others: &OsStr, auditor: &OsStr) -> OsString {
    let mut list = others.to_owned();
    if others.as_encoded_bytes().split(|byte| *byte == b':').any(|other| other == auditor.as_encoded_bytes())
    {
        return list;
    }
    if !list.is_empty() {
        list.push(":");
    }
    list.push(auditor);
    list
}

/// Returns the C library's settings (`GLIBC_TUNABLES`) under an auditor. The loader has then to set room for thread-local variables aside before it knows the
/// libraries, and some (jemalloc in Redis) want more than it does by itself: 4 KiB,
/// which are in the stack of each thread. With 16 KiB, threads whose stacks are as small as allowed could not be created.
#[must_use]
pub fn tunables(before: Option<&OsStr>) -> OsString {
    const NAME: &str = "glibc.rtld.optional_static_tls";
    let mut all = before.unwrap_or_default().to_owned();
    if all.to_string_lossy().contains(NAME) {
        return all;
    }
    if !all.is_empty() {
        all.push(":");
    }
    all.push(format!("{NAME}=4096"));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_kept() {
        let ours = "glibc.rtld.optional_static_tls=4096";
        assert_eq!(tunables(None), ours);
        assert_eq!(tunables(Some(OsStr::new("glibc.a.b=1"))), *format!("glibc.a.b=1:{ours}"));
        let theirs = OsStr::new("glibc.rtld.optional_static_tls=70000");
        assert_eq!(tunables(Some(theirs)), theirs);
    }

    #[test]
    fn other_auditors_come_first() {
        let list = |others: &str| audit_list(OsStr::new(others), OsStr::new("/ours"));
        assert_eq!(list(""), "/ours");
        assert_eq!(list("/theirs"), "/theirs:/ours");
        assert_eq!(list("/ours:/theirs"), "/ours:/theirs", "it is there once");
        assert_eq!(list("/ours2"), "/ours2:/ours");
    }
}
