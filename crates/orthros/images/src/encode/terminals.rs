//! Pseudo-terminals.

use std::collections::BTreeMap;

use anyhow::Result;
use orrery_kimage::Modes;

use crate::image_file::{ImageFile, ImageType};
use crate::messages::{Fown, Termios, TtyData, TtyFile, TtyInfo, TtyPty, Winsize};
use crate::model::{File, FileId, Terminal};

/// `TTY_TYPE__PTY`.
const PTY: u32 = 1;

pub(super) fn file(id: u32, flags: u32, path: FileId, terminal: &Terminal) -> TtyFile {
    TtyFile { id, tty_info_id: terminal.side(), flags, fown: Fown::NONE, regf_id: Some(path.0) }
}

/// Returns the state of each side of each terminal, and what waits to be read from it.
pub(super) fn all(files: &[File]) -> Result<[ImageFile; 2]> {
    let mut sides = BTreeMap::new();
    for file in files {
        if let File::Terminal { terminal, .. } = file {
            sides.insert(terminal.side(), &**terminal);
        }
    }
    let infos = sides.iter().map(|(&side, terminal)| info(side, terminal));
    let with_data = sides.iter().filter(|(_, terminal)| !terminal.state.waiting.is_empty());
    let data = with_data.map(|(&tty_id, terminal)| TtyData { tty_id, data: terminal.state.waiting.clone() });
    Ok([
        ImageFile::of_all("tty-info", ImageType::TtyInfo, infos)?,
        ImageFile::of_all("tty-data", ImageType::TtyData, data)?,
    ])
}

fn info(side: u32, terminal: &Terminal) -> TtyInfo {
    let state = &terminal.state;
    let [ws_row, ws_col, ws_xpixel, ws_ypixel] = state.size;
    TtyInfo {
        id: side,
        r#type: PTY,
        locked: state.locked,
        exclusive: state.exclusive,
        packet_mode: state.packets,
        sid: state.session.cast_unsigned(),
        pgrp: state.group.cast_unsigned(),
        rdev: terminal.device,
        termios: Some(termios(&state.modes)),
        termios_locked: Some(termios(&state.locked_modes)),
        winsize: Some(Winsize { ws_row, ws_col, ws_xpixel, ws_ypixel }),
        pty: Some(TtyPty { index: state.index }),
        uid: Some(terminal.uid),
        gid: Some(terminal.gid),
    }
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
