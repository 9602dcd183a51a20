//! Pseudo-terminals: who they belong to, how they are set, and what was typed or printed and not read yet.
//!
//! A pair has two sides, each a `tty_struct` that links to the other. What is written to one side waits, for the other, first
//! in the buffers of that side's port, then, once the line discipline has seen it, in the discipline's own ring.
//! Source: Linux `drivers/tty/{pty,n_tty,tty_buffer}.c`.

use std::collections::HashSet;

use crate::error::Result;
use crate::file::OpenFile;
use crate::object::Object;

/// `TTY_DRIVER_TYPE_PTY`, `PTY_TYPE_MASTER` of `include/linux/tty_driver.h`.
const PSEUDO: u64 = 4;
const MASTER: u64 = 1;
/// `TTY_EXCLUSIVE`, `TTY_PTY_LOCK` of `include/linux/tty.h`.
const EXCLUSIVE: u64 = 3;
const LOCKED: u64 = 16;
/// `N_TTY_BUF_SIZE`.
const RING: u64 = 4096;
/// A port holds at most 64 KiB that nobody has looked at.
const MOST_WAITING: usize = 1 << 20;

/// `struct ktermios`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of termios(3)")]
pub struct Modes {
    pub input: u32,
    pub output: u32,
    pub control: u32,
    pub local: u32,
    pub line: u32,
    pub characters: Vec<u8>,
    pub input_speed: u32,
    pub output_speed: u32,
}

/// One side of a pseudo-terminal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Its number, as in `/dev/pts/7`.
    pub index: u32,
    /// Whether it is the side that a terminal emulator has.
    pub is_master: bool,
    /// The session whose terminal it is, as it is numbered there; 0 where it is nobody's.
    pub session: i32,
    /// The process group in its foreground.
    pub group: i32,
    /// How it is set.
    pub modes: Modes,
    /// What of that may not be changed.
    pub locked_modes: Modes,
    /// Rows, columns, and both in pixels.
    pub size: [u32; 4],
    /// Whether the other side may not be opened yet.
    pub locked: bool,
    /// `TIOCEXCL`.
    pub exclusive: bool,
    /// `TIOCPKT`.
    pub packets: bool,
    /// What this side could read.
    pub waiting: Vec<u8>,
}

impl OpenFile<'_> {
    /// The pseudo-terminal's side that it is; nothing for any other device.
    ///
    /// # Errors
    ///
    /// Those of reading.
    pub fn terminal(&self) -> Result<Option<Terminal>> {
        let own = self.object().pointer("private_data", "tty_file_private")?;
        let Some(own) = own else { return Ok(None) };
        let tty = own.required("tty", "tty_struct")?;
        let driver = tty.required("driver", "tty_driver")?;
        if driver.u64("type")? != PSEUDO {
            return Ok(None);
        }
        let is_master = driver.u64("subtype")? == MASTER;
        let Some(link) = tty.pointer("link", "tty_struct")? else {
            return Err(tty.corrupt("its other side is gone"));
        };
        // Modes, sessions and groups are the slave's, whichever side is asked.
        let slave = if is_master { link } else { tty };
        let flags = tty.u64("flags")?;
        let size = |path| tty.u32(path);
        Ok(Some(Terminal {
            index: tty.u32("index")?,
            is_master,
            session: number(slave, "ctrl.session")?,
            group: number(slave, "ctrl.pgrp")?,
            modes: modes(slave.embedded("termios", "ktermios")?)?,
            locked_modes: modes(slave.embedded("termios_locked", "ktermios")?)?,
            size: [
                size("winsize.ws_row")?,
                size("winsize.ws_col")?,
                size("winsize.ws_xpixel")?,
                size("winsize.ws_ypixel")?,
            ],
            locked: flags >> LOCKED & 1 != 0,
            exclusive: flags >> EXCLUSIVE & 1 != 0,
            packets: tty.u32("ctrl.packet")? & 1 != 0,
            waiting: waiting(tty)?,
        }))
    }
}

/// The number that a process has in its own namespace; 0 for none.
fn number(tty: Object<'_>, path: &'static str) -> Result<i32> {
    let Some(pid) = tty.pointer(path, "pid")? else { return Ok(0) };
    let level = u64::from(pid.u32("level")?.min(32));
    let kernel = pid.kernel();
    let last = pid.address_of("numbers")?.wrapping_add(level * kernel.types().size("upid")?);
    kernel.object("upid", last)?.i32("nr")
}

fn modes(termios: Object<'_>) -> Result<Modes> {
    Ok(Modes {
        input: termios.u32("c_iflag")?,
        output: termios.u32("c_oflag")?,
        control: termios.u32("c_cflag")?,
        local: termios.u32("c_lflag")?,
        line: termios.u32("c_line")?,
        characters: termios.bytes("c_cc")?,
        input_speed: termios.u32("c_ispeed")?,
        output_speed: termios.u32("c_ospeed")?,
    })
}

/// Returns what the line discipline has, and then what it has not seen yet.
fn waiting(tty: Object<'_>) -> Result<Vec<u8>> {
    let kernel = tty.kernel();
    let mut found = Vec::new();
    if let Some(ring) = tty.pointer("disc_data", "n_tty_data")? {
        let (head, tail) = (ring.u64("read_head")?, ring.u64("read_tail")?);
        let count = head.wrapping_sub(tail);
        if count > RING {
            return Err(ring.corrupt(format!("{count} bytes wait in it")));
        }
        let bytes = ring.bytes("read_buf")?;
        for at in 0..count {
            let place = usize::try_from(tail.wrapping_add(at) % RING).unwrap_or(0);
            found.extend(bytes.get(place));
        }
    }
    let Some(port) = tty.pointer("port", "tty_port")? else { return Ok(found) };
    let size = kernel.types().size("tty_buffer")?;
    let mut next = port.pointer("buf.head", "tty_buffer")?;
    let mut seen = HashSet::new();
    while let Some(buffer) = next {
        let (read, used) = (u64::from(buffer.u32("read")?), u64::from(buffer.u32("used")?));
        if !seen.insert(buffer.address()) || read > used || used > MOST_WAITING as u64 {
            return Err(buffer.corrupt(format!("{read} of {used} bytes read")));
        }
        let mut bytes = vec![0; usize::try_from(used - read).unwrap_or(0)];
        kernel.read(buffer.address().wrapping_add(size).wrapping_add(read), &mut bytes)?;
        found.extend_from_slice(&bytes);
        if found.len() > MOST_WAITING {
            return Err(buffer.corrupt("more waits than can"));
        }
        next = buffer.pointer("next", "tty_buffer")?;
    }
    Ok(found)
}
