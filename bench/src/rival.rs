//! What a user would pick instead.

mod call;
mod cold_python;
mod copy_on_write;
mod coroutine;
pub mod dispatch;
mod dontneed;
mod fork;
mod fork_server;
mod hand_off;
mod monitor;
pub mod notify;
pub mod page_zero;
mod python_fork_server;
mod session;

pub use call::{ForkPerCall, WholeCopy};
pub use cold_python::{ColdPython, PYTHON};
pub use copy_on_write::CopyOnWrite;
pub use coroutine::Coroutine;
pub use dontneed::DontNeed;
pub use fork::{ForkExitWait, fork_exit_wait};
pub use fork_server::ForkServer;
pub use hand_off::{Between, By, HandOff, round_trips};
pub use monitor::{
    Caller, Direct, InDirectory, InlineCheck, LeastOpen, Remote, SeparateProcess, Served, Stops, Traced,
};
pub use python_fork_server::PythonForkServer;
pub use session::ForkPerSession;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contender::Contender;
    use crate::footprint::{Backing, Footprint};

    const SIZE: usize = 4 << 20;

    /// Each rival itself fails where the memory does not come back, so measuring is the test.
    #[test]
    fn every_rival_undoes_what_was_dirtied() {
        let anonymous = || Footprint::anonymous(SIZE, Backing::Small);
        let rivals: [(&str, Box<dyn Contender>); 3] = [
            ("fork", Box::new(ForkExitWait::new(anonymous().unwrap()))),
            ("fork server", Box::new(ForkServer::start(anonymous).unwrap())),
            ("dontneed", Box::new(DontNeed::new(SIZE, Backing::Small).unwrap())),
        ];
        for (name, mut rival) in rivals {
            for work in ["0", "1", "1000", "10+1000"] {
                let sample =
                    rival.measure(work, 3).unwrap_or_else(|error| panic!("{name}, {work}: {error:#}"));
                assert_eq!(sample.iterations, 3);
                assert!(!sample.elapsed.is_zero(), "{name}");
            }
            assert!(rival.measure("many", 1).is_err(), "{name}");
        }
    }
}
