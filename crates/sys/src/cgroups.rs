//! Where a process stands in the control group hierarchies (cgroups(7)).
//!
//! Reads and parses text, so unlike the rest of this crate it allocates.

use std::fs;
use std::path::{Path, PathBuf};

/// Returns the directory of this process' control group, for a version 1 controller or for version 2 (`None`).
pub fn own_group(controller: Option<&str>) -> Option<PathBuf> {
    group("self", controller)
}

/// Returns the directory of a process' control group, under this process' own mounts.
pub fn group_of(pid: i32, controller: Option<&str>) -> Option<PathBuf> {
    group(&pid.to_string(), controller)
}

fn group(process: &str, controller: Option<&str>) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let groups = fs::read_to_string(format!("/proc/{process}/cgroup")).ok()?;
    locate(&mounts, &groups, controller)
}

/// [`own_group`] on the text of `/proc/self/mountinfo` and `/proc/self/cgroup`: proc(5), cgroups(7).
fn locate(mounts: &str, groups: &str, controller: Option<&str>) -> Option<PathBuf> {
    let has = |list: &str, wanted: &str| list.split(',').any(|word| word == wanted);
    let (root, mount_point) = mounts.lines().find_map(|line| {
        let (place, source) = line.split_once(" - ")?;
        let mut place = place.split(' ').skip(3);
        let mut source = source.split(' ');
        let (kind, options) = (source.next()?, source.nth(1)?);
        let fits = match controller {
            Some(controller) => kind == "cgroup" && has(options, controller),
            None => kind == "cgroup2",
        };
        if fits { Some((place.next()?, place.next()?)) } else { None }
    })?;
    let path = groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, path) = (fields.next()?, fields.next()?);
        let fits = controller.map_or(controllers.is_empty(), |controller| has(controllers, controller));
        fits.then_some(path)
    })?;
    // In a container the mount shows a part of the hierarchy, whose root is a group.
    let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
    Some(Path::new(mount_point).join(below).components().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
30 29 0:26 / /sys/fs/cgroup/unified rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
35 29 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:16 - cgroup cgroup rw,cpu,cpuacct
36 29 0:32 /docker/abc /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory
";
    const GROUPS: &str = "5:memory:/docker/abc/inner\n3:cpu,cpuacct:/user.slice\n0::/user.slice/a:b\n";

    #[test]
    fn own_groups_are_found_under_their_mounts() {
        let at = |controller| locate(MOUNTS, GROUPS, controller);
        assert_eq!(at(Some("cpu")), Some("/sys/fs/cgroup/cpu,cpuacct/user.slice".into()));
        assert_eq!(at(Some("memory")), Some("/sys/fs/cgroup/memory/inner".into()));
        assert_eq!(at(Some("pids")), None);
        assert_eq!(at(None), Some("/sys/fs/cgroup/unified/user.slice/a:b".into()));
    }

    #[test]
    fn a_child_is_in_the_group_of_its_parent() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        for controller in [None, Some("cpu"), Some("cpuacct")] {
            assert_eq!(group_of(child.id().cast_signed(), controller), own_group(controller));
        }
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
