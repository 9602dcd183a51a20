//! Descriptors of our own, out of the program's way.

use std::os::fd::OwnedFd;

use rustix::process::{Resource, getrlimit};

/// How far below the limit our own descriptors are put.
const ROOM: u64 = 64;
/// Where they are put when the limit is high.
const HIGH: u64 = 700;

/// Moves `fd` to a high number, so that the program's own next `open` still gets the lowest free one. Where no high
/// number is free it stays where it is.
pub fn raise(fd: OwnedFd) -> OwnedFd {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let wanted = i32::try_from(HIGH.min(limit.saturating_sub(ROOM))).unwrap_or(0);
    rustix::io::fcntl_dupfd_cloexec(&fd, wanted).unwrap_or(fd)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn low_numbers_stay_free() {
        let low: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        let number = low.as_raw_fd();
        let high = raise(low);
        assert!(high.as_raw_fd() > number);
        assert!(rustix::io::fcntl_getfd(&high).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
