//! Images of processes that a kernel left behind: read from its memory into a model, and encoded for `criu restore`.
//!
//! Data walks one way: [`read_service`] reads the dead kernel into a [`Service`], a plain model, which is complete or an error;
//! [`encode`] makes the contents of CRIU's image files of it, without any other input; [`write()`] puts them into a directory,
//! with the pages that the dead memory has. What CRIU does not restore is the model's [`RestoreState`], a file beside the images.
//!
//! The format of the images is CRIU's. Its messages are generated from the descriptions in `proto/`.

mod encode;
mod image_file;
mod messages;
mod model;
mod read;
mod write;

pub use encode::{Images, encode};
pub use model::{
    Connection, Datagram, Epoll, EpollEntry, ExitedLeaders, FileOwner, FileSizeLimit, Holder, IpcObject,
    MessageQueue, PAGE, PacketPipe, PageRun, PendingConnection, RestoreState, SemaphoreSet, Service,
    SocketOption, SocketRestrictions, SocketSettings, ThreadAttributes, ThreadCall, UnnamedFile,
};
pub use read::{CpuRegisters, Exclusions, MAX_UNNAMED_FILE, estimate_memory, read_service, time_of_death};
pub use write::{fill_unnamed_file, write};
