//! The options that turn services on, as the section `[services]` of a policy does.

use std::time::Duration;

use clap::{Args, ValueEnum};
use orrery_hijack::Services;
use orrery_hijack::policy::{Mount, Remembered, Sleep, poll_time};

/// Calls that the executive answers itself
#[derive(Args)]
pub(super) struct Options {
    /// End sleeps on time, by reading the clock in their last microseconds
    #[arg(long, value_name = "HOW")]
    sleep: Option<How>,

    /// Answer calls from memory whose results cannot change unnoticed
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    remember: Vec<What>,

    /// Have threads of real-time priority look for a datagram for so long before they block in recv or recvmsg: up to 10ms
    #[arg(long, value_name = "TIME", value_parser = poll_time)]
    poll_receive: Option<Duration>,

    /// Show a tar file's content at a path, as a read-only directory
    #[arg(long = "mount", value_name = "PATH=ARCHIVE", value_parser = mount)]
    mounts: Vec<Mount>,
}

fn mount(text: &str) -> Result<Mount, String> {
    let (prefix, archive) = text.split_once('=').ok_or("a mount is written PATH=ARCHIVE")?;
    Mount::new(prefix, archive)
}

#[derive(Clone, Copy, ValueEnum)]
enum How {
    /// Without privileges: no timer slack, a short time slice
    Precise,
    /// Also real-time priority, or nice -20, for threads that mostly sleep, where permitted
    Realtime,
}

#[derive(Clone, Copy, ValueEnum)]
enum What {
    /// getpid, and gettid in processes that never had a second thread
    Process,
    /// getuid, geteuid, getgid, getegid
    User,
}

impl Options {
    /// Returns the services that the options turn on.
    pub(super) fn services(&self) -> Services {
        let sleep = self.sleep.map(|how| match how {
            How::Precise => Sleep::Precise,
            How::Realtime => Sleep::Realtime,
        });
        let remember = self.remember.iter().map(|what| match what {
            What::Process => Remembered::Process,
            What::User => Remembered::User,
        });
        Services {
            sleep,
            remember: remember.collect(),
            poll_receive: self.poll_receive,
            mounts: self.mounts.clone(),
        }
    }
}
