//! Unix sockets: their names, who is connected to whom, and what was sent and not read, descriptors in flight included.
//!
//! A connection that was asked for and not accepted is a socket without a file: it hangs, as the sender of an empty
//! packet, in the queue of the socket that listens. Source: Linux `net/unix/af_unix.c`, `include/net/af_unix.h`.

use crate::error::Result;
use crate::file::{OpenFile, Path, resolve};
use crate::object::Object;
use crate::packet::{packets, whole};
use crate::volume::{Attributes, attributes};

const UNIX: u32 = 1;
const LISTEN: u32 = 10;
/// `sizeof(sa_family_t)`: what stands before a name.
const FAMILY: u64 = 2;
/// `sun_path` takes 108 bytes, and the kernel adds a zero.
const LONGEST_NAME: u64 = 109;
/// `SOCK_PASSCRED` of `include/linux/net.h`.
const PASS_CREDENTIALS: u32 = 3;
/// `SCM_MAX_FD`.
const MOST_FILES: u32 = 253;

/// A Unix socket.
#[derive(Clone, Debug)]
pub struct UnixSocket<'k> {
    /// Its own address in the kernel, by which others name it as their peer.
    pub address: u64,
    /// `SOCK_STREAM` (1), `SOCK_DGRAM` (2), `SOCK_SEQPACKET` (5).
    pub kind: u32,
    /// 1 connected, 7 neither, 10 listening.
    pub state: u32,
    /// How many connections may wait to be accepted.
    pub backlog: u32,
    /// `RCV_SHUTDOWN` (1) and `SEND_SHUTDOWN` (2).
    pub shutdown: u32,
    /// `SO_SNDBUF` and `SO_RCVBUF`.
    pub buffers: (u32, u32),
    /// `SO_PASSCRED`.
    pub passes_credentials: bool,
    /// Its name as `bind` was given it, with the zero that ends a path; an abstract one begins with a zero.
    pub name: Vec<u8>,
    /// Of a name in a file system: where it is, and what stands there.
    pub place: Option<(Path, Attributes)>,
    /// The address of the socket that it is connected to, which may have been closed since.
    pub peer: Option<u64>,
    /// Whether some process has that other side. Nobody has one that is closed, or not accepted yet.
    pub peer_is_open: bool,
    /// What waits to be read.
    pub queue: Vec<UnixMessage<'k>>,
    /// Of one that listens: the connections that nobody has accepted.
    pub waiting: Vec<UnixWaiting<'k>>,
}

/// What was sent at once.
#[derive(Clone, Debug)]
pub struct UnixMessage<'k> {
    /// The bytes not read yet.
    pub bytes: Vec<u8>,
    /// Files that were sent along (`SCM_RIGHTS`).
    pub files: Vec<OpenFile<'k>>,
}

/// A connection that nobody has accepted.
#[derive(Clone, Debug)]
pub struct UnixWaiting<'k> {
    /// The address of its nameless side, which who asked for it has as its peer.
    pub address: u64,
    /// What was sent over it already.
    pub queue: Vec<UnixMessage<'k>>,
}

impl<'k> OpenFile<'k> {
    /// The socket, if it is a Unix one.
    ///
    /// # Errors
    ///
    /// Those of reading. The file must be a socket.
    pub fn unix_socket(&self) -> Result<Option<UnixSocket<'k>>> {
        let socket = self.object().required("private_data", "socket")?;
        let sock = socket.required("sk", "sock")?;
        if sock.u32("__sk_common.skc_family")? != UNIX {
            return Ok(None);
        }
        let unix = sock.kernel().object("unix_sock", sock.address())?;
        let state = sock.u32("__sk_common.skc_state")?;
        let (name, place) = name(unix)?;
        let peer = unix.pointer("peer", "sock")?;
        let peer_is_open =
            peer.map(|peer| peer.u64("sk_socket")).transpose()?.is_some_and(|socket| socket != 0);
        let (mut queue, mut waiting) = (Vec::new(), Vec::new());
        for packet in packets(sock, "sk_receive_queue")? {
            if state == LISTEN {
                let nameless = packet.required("sk", "sock")?;
                waiting.push(UnixWaiting { address: nameless.address(), queue: messages(nameless)? });
            } else {
                queue.push(message(packet)?);
            }
        }
        Ok(Some(UnixSocket {
            address: sock.address(),
            kind: sock.u32("sk_type")?,
            state,
            backlog: sock.u32("sk_max_ack_backlog")?,
            shutdown: sock.u32("sk_shutdown")? & 3,
            buffers: (sock.u32("sk_sndbuf")?, sock.u32("sk_rcvbuf")?),
            // A member since Linux 6.16.
            passes_credentials: if sock.has("sk_scm_credentials") {
                sock.u32("sk_scm_credentials")? != 0
            } else {
                socket.u64("flags")? >> PASS_CREDENTIALS & 1 != 0
            },
            name,
            place,
            peer: peer.map(|peer| peer.address()),
            peer_is_open,
            queue,
            waiting,
        }))
    }
}

/// Where a name is that is a path, and what stands there.
type Place = Option<(Path, Attributes)>;

/// A socket's name and, if that is a path, where it leads.
fn name(unix: Object<'_>) -> Result<(Vec<u8>, Place)> {
    let Some(address) = unix.pointer("addr", "unix_address")? else { return Ok((Vec::new(), None)) };
    let length = u64::from(address.u32("len")?).checked_sub(FAMILY).filter(|length| *length <= LONGEST_NAME);
    let length = length.ok_or_else(|| address.corrupt("it has a name that is too long"))?;
    let mut name = vec![0; usize::try_from(length).unwrap_or(0)];
    unix.kernel().read(address.address_of("name")?.wrapping_add(FAMILY), &mut name)?;
    if name.first().is_none_or(|&first| first == 0) {
        return Ok((name, None));
    }
    let path = unix.embedded("path", "path")?;
    let inode = path.required("dentry", "dentry")?.required("d_inode", "inode")?;
    Ok((name, Some((resolve(path)?, attributes(inode)?))))
}

fn messages<'k>(sock: Object<'k>) -> Result<Vec<UnixMessage<'k>>> {
    packets(sock, "sk_receive_queue")?.into_iter().map(message).collect()
}

fn message(packet: Object<'_>) -> Result<UnixMessage<'_>> {
    let control = packet.kernel().object("unix_skb_parms", packet.address_of("cb")?)?;
    let mut bytes = whole(packet)?;
    let consumed = control.u32("consumed")? as usize;
    if consumed > bytes.len() {
        return Err(packet.corrupt(format!("{consumed} of its {} bytes are read", bytes.len())));
    }
    bytes.drain(..consumed);
    let mut files = Vec::new();
    if let Some(list) = control.pointer("fp", "scm_fp_list")? {
        let count = list.u32("count")? & 0xffff;
        if count > MOST_FILES {
            return Err(list.corrupt(format!("{count} files at once")));
        }
        let first = list.address_of("fp")?;
        for index in 0..u64::from(count) {
            let address = list.kernel().read_u64(first.wrapping_add(index * 8))?;
            files.push(OpenFile::check(list.kernel().object("file", address)?)?);
        }
    }
    Ok(UnixMessage { bytes, files })
}
