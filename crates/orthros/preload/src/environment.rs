//! What the environment says, for programs that were not written for this library: `ORTHROS_CALLS=write=again,rename=EIO`.
//!
//! Preloaded and told nothing, the library begins again what the paper's does: writing and sending, opening and
//! connecting. Then these happen at least once, where otherwise they happen at most once.

use std::ffi::{c_int, c_long};

use syscalls::Sysno;

use crate::{entry, orrery_failover_set_result};

const NAME: &str = "ORTHROS_CALLS";
/// What is begun again where nothing is said.
const AGAIN: &[Sysno] = &[
    Sysno::write,
    Sysno::writev,
    Sysno::pwrite64,
    Sysno::pwritev,
    Sysno::sendto,
    Sysno::sendmsg,
    Sysno::open,
    Sysno::openat,
    Sysno::connect,
];
const ERRORS: &[(&str, c_int)] = &[
    ("EINTR", libc::EINTR),
    ("EIO", libc::EIO),
    ("EAGAIN", libc::EAGAIN),
    ("ECANCELED", libc::ECANCELED),
    ("ECONNRESET", libc::ECONNRESET),
    ("ETIMEDOUT", libc::ETIMEDOUT),
    ("ENOSPC", libc::ENOSPC),
    ("EBUSY", libc::EBUSY),
];

/// What the dynamic linker calls when it has loaded the library.
#[used]
#[unsafe(link_section = ".init_array")]
static PREPARE: extern "C" fn() = prepare;

extern "C" fn prepare() {
    entry::prepare();
    match std::env::var(NAME) {
        Err(_) => {
            for call in AGAIN {
                orrery_failover_set_result(c_long::from(call.id()), 1);
            }
        }
        Ok(text) => {
            for part in text.split(',').filter(|part| !part.is_empty()) {
                match parse(part) {
                    Some((call, answer)) => {
                        orrery_failover_set_result(call, answer);
                    }
                    None => eprintln!(
                        "liborthros: {NAME} says {part:?}, which is no CALL=again, CALL=default or CALL=ERROR; \
                         it is passed over"
                    ),
                }
            }
        }
    }
}

/// A call and its answer.
fn parse(part: &str) -> Option<(c_long, c_int)> {
    let (call, answer) = part.split_once('=')?;
    let call = call.trim().parse::<Sysno>().ok()?;
    let answer = match answer.trim() {
        "again" => 1,
        "default" => 0,
        error => -ERRORS.iter().find(|(name, _)| *name == error)?.1,
    };
    Some((c_long::from(call.id()), answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_and_nonsense_is_none() {
        assert_eq!(parse("write=again"), Some((libc::SYS_write, 1)));
        assert_eq!(parse(" rename = EIO"), Some((libc::SYS_rename, -libc::EIO)));
        assert_eq!(parse("fsync=default"), Some((libc::SYS_fsync, 0)));
        for nonsense in ["", "write", "write=", "write=often", "wright=again", "=EIO", "write=eio"] {
            assert_eq!(parse(nonsense), None, "{nonsense}");
        }
    }
}
