//! Files that are neither on a file system nor sockets: pipes with what is in them, eventfds, epoll and their like.

use crate::error::Result;
use crate::file::OpenFile;
use crate::kernel::Kernel;
use crate::rbtree;

/// A pipe holds at most this (`/proc/sys/fs/pipe-max-size` can be raised to 2 GiB by root; not believed here).
const LARGEST_PIPE: usize = 64 << 20;
/// `PIPE_BUF_FLAG_PACKET` of `include/linux/pipe_fs_i.h`.
const PACKET: u32 = 8;

/// What one descriptor of an epoll waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpollTarget {
    /// The descriptor under which it was added, which may have been closed since.
    pub descriptor: u32,
    /// The address of the open file.
    pub file: u64,
    /// The events, as in `struct epoll_event`.
    pub events: u32,
    /// What the program wants to get along with them.
    pub data: u64,
}

/// A file without a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Special {
    /// One end of a pipe.
    Pipe {
        /// What was written and not read.
        content: Vec<u8>,
        /// How long each write to it was that is still there, and whether it is a packet (`O_DIRECT`), which is read by
        /// itself.
        parts: Vec<(u32, bool)>,
        /// How much fits, in bytes.
        capacity: u64,
    },
    /// An eventfd.
    Event {
        /// The value of the counter.
        count: u64,
        /// Whether it counts down by one (`EFD_SEMAPHORE`).
        semaphore: bool,
    },
    /// An epoll.
    Epoll(Vec<EpollTarget>),
    /// A timerfd.
    Timer {
        /// The clock that it goes by.
        clock: u32,
        /// How often it has gone off since it was read.
        ticks: u64,
        /// `TFD_TIMER_ABSTIME` and its like, as it was set.
        flags: u32,
        /// Nanoseconds between two times; 0 for once.
        interval: u64,
        /// When it goes off next, in nanoseconds of its clock; nothing where it is not set. Of one that goes off again
        /// and again and was not read since, when it last did: the kernel sets it again only then.
        expires: Option<u64>,
        /// Whether it has gone off and was not read since.
        expired: bool,
    },
    /// A signalfd, and the signals that it reads.
    Signal {
        /// One bit for each, from signal 1 on.
        mask: u64,
    },
    /// Something else, by its name in `/proc/PID/fd`.
    Other(String),
}

impl OpenFile<'_> {
    /// Returns what it is and what it holds, of a pipe or of a file without a name.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn special(&self) -> Result<Special> {
        let file = self.object();
        if let Some(pipe) = self.inode()?.pointer("i_pipe", "pipe_inode_info")? {
            return self.pipe(pipe);
        }
        let name = self.path()?.display();
        Ok(match name.as_str() {
            "anon_inode:[eventfd]" => {
                let context = file.required("private_data", "eventfd_ctx")?;
                Special::Event { count: context.u64("count")?, semaphore: context.u32("flags")? & 1 != 0 }
            }
            "anon_inode:[eventpoll]" => {
                let poll = file.required("private_data", "eventpoll")?;
                let kernel = file.kernel();
                let root = kernel.read_u64(poll.address_of("rbr")?)?;
                let mut targets = Vec::new();
                for item in rbtree::members(kernel, root, "epitem", "rbn")? {
                    targets.push(EpollTarget {
                        descriptor: item.u32("ffd.fd")?,
                        file: item.u64("ffd.file")?,
                        events: item.u32("event.events")?,
                        data: item.u64("event.data")?,
                    });
                }
                Special::Epoll(targets)
            }
            "anon_inode:[timerfd]" => {
                let context = file.required("private_data", "timerfd_ctx")?;
                let clock = context.u32("clockid")?;
                if clock > 7 {
                    // Those that wake the machine lie elsewhere in the structure.
                    return Ok(Special::Other(format!("{name} of clock {clock}")));
                }
                let (interval, expired) = (context.u64("tintv")?, context.u32("expired")? & 0xffff != 0);
                let set = context.u32("t.tmr.state")? & 1 != 0 || (expired && interval != 0);
                Special::Timer {
                    clock,
                    ticks: context.u64("ticks")?,
                    flags: context.u32("settime_flags")?,
                    interval,
                    expired,
                    expires: if set { Some(context.u64("t.tmr.node.expires")?) } else { None },
                }
            }
            // The kernel keeps those that are not to be read.
            "anon_inode:[signalfd]" => {
                Special::Signal { mask: !file.required("private_data", "signalfd_ctx")?.u64("sigmask")? }
            }
            _ => Special::Other(name),
        })
    }

    fn pipe(&self, pipe: crate::Object<'_>) -> Result<Special> {
        let kernel: &Kernel = pipe.kernel();
        let (head, tail, slots) = (pipe.u32("head")?, pipe.u32("tail")?, pipe.u32("ring_size")?);
        if !slots.is_power_of_two() || head.wrapping_sub(tail) > slots {
            return Err(pipe.corrupt(format!("{} of {slots} slots in use", head.wrapping_sub(tail))));
        }
        let buffers = pipe.required("bufs", "pipe_buffer")?;
        let size = kernel.types().size("pipe_buffer")?;
        let (mut content, mut parts) = (Vec::new(), Vec::new());
        let mut slot = tail;
        while slot != head {
            let address = buffers.address().wrapping_add(u64::from(slot & (slots - 1)) * size);
            let buffer = kernel.object("pipe_buffer", address)?;
            let (offset, length) = (buffer.u32("offset")?, buffer.u32("len")? as usize);
            if content.len() + length > LARGEST_PIPE {
                return Err(pipe.corrupt("it holds more than pipes do"));
            }
            if length > 0 {
                parts.push((buffer.u32("len")?, buffer.u32("flags")? & PACKET != 0));
                let at = content.len();
                content.resize(at + length, 0);
                let physical = kernel.page_physical(buffer.u64("page")?)?;
                kernel.memory().read(physical + u64::from(offset), &mut content[at..])?;
            }
            slot = slot.wrapping_add(1);
        }
        Ok(Special::Pipe { content, parts, capacity: u64::from(slots) * 4096 })
    }
}
