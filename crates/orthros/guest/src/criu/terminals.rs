//! Pseudo-terminals of which the service has both sides: a program in its terminal, and who serves the terminal.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use orrery_kimage::{Modes, OpenFile, Terminal};

use super::files::nobody;
use super::messages::{File, Termios, TtyData, TtyFile, TtyInfo, TtyPty, Winsize};
use super::writer::{ImageFile, Kind};
use super::{Context, unix};

pub(super) const TTY: u32 = 11;
const PSEUDO: u32 = 1;

/// Both sides of each, by CRIU's number: twice the terminal's, plus one for the master.
#[derive(Default)]
pub(super) struct Terminals {
    sides: BTreeMap<u32, (TtyInfo, Vec<u8>)>,
}

/// Adds a file that is one side of a pseudo-terminal.
pub(super) fn add(context: &mut Context<'_>, file: &OpenFile<'_>, terminal: &Terminal) -> Result<(u32, u32)> {
    let flags = file.flags()?;
    let path = file.path()?.display();
    let regf_id = context.files.beside(flags, path);
    let id = context.files.next();
    let side = terminal.index * 2 + u32::from(terminal.is_master);
    let attributes = file.attributes()?;
    // The kernel packs 12 and 20 bits, programs 8 and 8 and the rest above.
    let device = libc::makedev(attributes.device >> 20, attributes.device & 0xf_ffff);
    let [ws_row, ws_col, ws_xpixel, ws_ypixel] = terminal.size;
    let info = TtyInfo {
        id: side,
        kind: PSEUDO,
        locked: terminal.locked,
        exclusive: terminal.exclusive,
        packet_mode: terminal.packets,
        sid: terminal.session.cast_unsigned(),
        pgrp: terminal.group.cast_unsigned(),
        rdev: u32::try_from(device)?,
        termios: Some(termios(&terminal.modes)),
        termios_locked: Some(termios(&terminal.locked_modes)),
        winsize: Some(Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel }),
        pty: Some(TtyPty { index: terminal.index }),
        uid: Some(attributes.uid),
        gid: Some(attributes.gid),
    };
    context.terminals.sides.insert(side, (info, terminal.waiting.clone()));
    let flags = flags & !(libc::O_CLOEXEC | libc::O_CREAT).cast_unsigned();
    let tty = TtyFile { id, tty_info_id: side, flags, fown: nobody(), regf_id: Some(regf_id) };
    context.files.add(file, File { kind: TTY, id, tty: Some(tty), ..File::default() });
    Ok((id, TTY))
}

fn termios(modes: &Modes) -> Termios {
    Termios {
        c_iflag: modes.input,
        c_oflag: modes.output,
        c_cflag: modes.control,
        c_lflag: modes.local,
        c_line: modes.line,
        c_ispeed: modes.input_speed,
        c_ospeed: modes.output_speed,
        c_cc: modes.characters.iter().copied().map(u32::from).collect(),
    }
}

impl Terminals {
    /// Whether the service has both sides of a terminal.
    pub(super) fn is_whole(&self, side: u32) -> bool {
        self.sides.contains_key(&side) && self.sides.contains_key(&(side ^ 1))
    }

    pub(super) fn write(&self, folder: &Path) -> Result<()> {
        let mut infos = ImageFile::create(folder, "tty-info", Kind::TtyInfo)?;
        let mut data = ImageFile::create(folder, "tty-data", Kind::TtyData)?;
        for (&side, (info, waiting)) in &self.sides {
            if !self.is_whole(side) {
                continue;
            }
            infos.put(info)?;
            if !waiting.is_empty() {
                data.put(&TtyData { tty_id: side, data: waiting.clone() })?;
            }
        }
        infos.finish()?;
        data.finish()
    }
}

/// Hangs up the terminals of which the service has one side only.
pub(super) fn hang_up(context: &mut Context<'_>) {
    let alone: Vec<(u32, u32, u32)> = context
        .files
        .of_kind(TTY)
        .filter_map(|file| file.tty.as_ref())
        .filter(|tty| !context.terminals.is_whole(tty.tty_info_id))
        .map(|tty| (tty.id, tty.tty_info_id, tty.flags))
        .collect();
    for (id, side, flags) in alone {
        let remark = format!("terminal {} is hung up: its other side is not the service's", side / 2);
        context.lose(remark);
        let gone = unix::hang_up_as(context, id, flags);
        context.files.replace(gone);
    }
}
