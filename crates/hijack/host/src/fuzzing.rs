//! What fuzz targets call, and nobody else.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use orrery_hijack_image::request_slots::CODE;
use orrery_hijack_image::rewrite_plan::{RELOCATED, RewritePlan, SYSCALL};

use crate::archive::{joined, rewritten};
use crate::rewrite_window::plan;

/// Plans how to rewrite a site whose code ends with these bytes before its `syscall`.
///
/// # Panics
/// If the plan does not survive being encoded, or does not fit its code.
pub fn rewriting(input: &[u8]) {
    let mut code = [0; CODE];
    let before = CODE - SYSCALL;
    let given = input.len().min(before);
    code[before - given..before].copy_from_slice(&input[input.len() - given..]);
    code[before..].copy_from_slice(&[0x0f, 0x05]);
    let Some(plan) = plan(&code) else { return };
    assert_eq!(RewritePlan::decode(&RewritePlan::encode(Some(&plan))), Some(plan));
    let window = &code[before - plan.length()..before];
    let from = 0x5000_0000_0000;
    for to in [from + 0x1234_5678, from - 0x7000_0000] {
        let mut out = [0; RELOCATED];
        let relocated = plan.relocate(window, from, to, &mut out);
        assert!(relocated.is_none_or(|moved| moved.length <= RELOCATED));
    }
    let (jump, changed) = plan.jump(0x1234_5678).unwrap_or_default();
    assert!(changed <= jump.len() && changed <= plan.length() + SYSCALL);
}

/// Rewrites a symbolic link of a mounted archive: its directory in the mount, where it leads, and where the mount is, each ended by a zero
/// byte.
///
/// # Panics
/// If it then leads elsewhere.
pub fn mount_link(input: &[u8]) {
    let mut parts = input.splitn(3, |byte| *byte == 0).map(|part| Path::new(OsStr::from_bytes(part)));
    let (Some(inside), Some(target), Some(prefix)) = (parts.next(), parts.next(), parts.next()) else {
        return;
    };
    // Directories of the mount are found by reading them, and a policy's prefix is an absolute path without dots.
    let plain = |path: &Path| joined(Path::new("/"), path);
    let (directory, prefix) = (plain(inside), plain(prefix));
    let inside = directory.strip_prefix("/").unwrap_or(inside);
    let meant = joined(&prefix.join(inside), target);
    let Some(new) = rewritten(&directory, target, &prefix) else { return };
    // A relative one is resolved in the mount, whose root is the prefix.
    let leads = if new.is_absolute() {
        new
    } else {
        let within = joined(&directory, &new);
        plain(&prefix.join(within.strip_prefix("/").unwrap_or(&within)))
    };
    assert_eq!(leads, meant, "{} in {} of {}", target.display(), directory.display(), prefix.display());
}
