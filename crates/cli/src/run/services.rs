//! The options that turn services on, as the section `[services]` of a policy does.

use clap::{Args, ValueEnum};
use orrery_hijack::Services;
use orrery_hijack::policy::{Mount, Remembered, Sleep};

/// Calls that the executive answers itself
#[derive(Args)]
pub(super) struct Options {
    /// Have sleeps end on time: at the price of reading the clock for their last microseconds
    #[arg(long, value_name = "HOW")]
    sleep: Option<How>,

    /// Remember answers that cannot change unseen, instead of asking the kernel each time
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    remember: Vec<What>,

    /// Have programs see a tar file's content at a path, as a directory that cannot be written to
    #[arg(long = "mount", value_name = "PATH=ARCHIVE", value_parser = mount)]
    mounts: Vec<Mount>,
}

fn mount(text: &str) -> Result<Mount, String> {
    let (prefix, archive) = text.split_once('=').ok_or("a mount is written PATH=ARCHIVE")?;
    Mount::new(prefix, archive)
}

#[derive(Clone, Copy, ValueEnum)]
enum How {
    /// With what everybody may do: timers without slack, a short slice
    Precise,
    /// And give threads that sleep most of the time real-time priority, or the highest nice value, where permitted
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
    /// What they say.
    pub(super) fn services(&self) -> Services {
        let sleep = self.sleep.map(|how| match how {
            How::Precise => Sleep::Precise,
            How::Realtime => Sleep::Realtime,
        });
        let remember = self.remember.iter().map(|what| match what {
            What::Process => Remembered::Process,
            What::User => Remembered::User,
        });
        Services { sleep, remember: remember.collect(), mounts: self.mounts.clone() }
    }
}
