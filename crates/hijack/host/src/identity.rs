//! As whom a process acts: read from `/proc` (proc_pid_status(5), namespaces(7)).

use std::fs;
use std::path::Path;
use std::sync::OnceLock;

use orrery_hijack_image::users::Identity;

/// Returns as whom a thread acts, in this process's numbers; `None` where it has ended. Capabilities in another user namespace than this
/// process's do not count.
pub(crate) fn of_thread(thread: libc::pid_t) -> Option<Identity> {
    let status = fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    let mut identity = parsed(&status)?;
    if !shares_namespace(thread) {
        identity.capabilities = 0;
    }
    Some(identity)
}

/// Returns whether a thread is in this process's user namespace. One that may not be looked at is not.
fn shares_namespace(thread: libc::pid_t) -> bool {
    static OWN: OnceLock<Option<std::path::PathBuf>> = OnceLock::new();
    let read = |path: String| fs::read_link(Path::new(&path)).ok();
    let own = OWN.get_or_init(|| read("/proc/self/ns/user".to_owned()));
    own.is_some() && *own == read(format!("/proc/{thread}/ns/user"))
}

fn parsed(status: &str) -> Option<Identity> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let ids = |name: &str| -> Option<[u32; 3]> {
        let numbers: Vec<u32> =
            field(name)?.split_ascii_whitespace().take(3).filter_map(|word| word.parse().ok()).collect();
        numbers.try_into().ok()
    };
    let capabilities = u64::from_str_radix(field("CapPrm:")?.trim(), 16).ok()?;
    Some(Identity { users: ids("Uid:")?, groups: ids("Gid:")?, capabilities })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_read() {
        let status = "Name:\tx\nUid:\t1\t2\t3\t2\nGid:\t4\t5\t6\t5\nCapInh:\t0\nCapPrm:\t00000000000000c0\n";
        let expected = Identity { users: [1, 2, 3], groups: [4, 5, 6], capabilities: 0xc0 };
        assert_eq!(parsed(status), Some(expected));
        assert_eq!(parsed("Uid:\t1\t2\n"), None);
    }

    #[test]
    fn this_process_is_found() {
        let own = of_thread(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(own.users[1], rustix::process::geteuid().as_raw());
        assert_eq!(of_thread(i32::MAX), None);
    }
}
