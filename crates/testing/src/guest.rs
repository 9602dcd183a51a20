//! What virtual machines that run commands for tests and benchmarks boot, busybox as `/bin/busybox` and [`INIT`] as `/init`, and their
//! [`Shell`].

use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The first program. It loads `/modules/*` in order, waits for the block device of a virtio-pmem, which comes some time later, prints
/// `READY` on the first serial port, and then runs each line that comes in on the second one by a shell, whose output it writes there, followed by a line with `END` and the exit status.
pub const INIT: &str = r#"#!/bin/busybox sh
export PATH=/bin
/bin/busybox --install -s /bin
mkdir -p /proc /sys /dev /mnt /tmp
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for module in /modules/*; do insmod $module; done
if [ -n "$(ls /sys/bus/nd/devices 2>/dev/null)" ]; then
    for try in $(seq 600); do [ -e /dev/pmem0 ] && break; sleep 0.1; done
fi
stty -F /dev/ttyS1 raw -echo
exec 3<>/dev/ttyS1
echo READY
while read -r line <&3; do
    { sh -c "$line" 2>&1; echo "::END $?"; } >&3 < /dev/null
done
"#;

/// The beginning of the line after the output of a command.
const END: &str = "::END ";

/// The modules of Debian's kernel for images of trees: on virtio-pmem with DAX, on virtio-blk, and below an overlay; and for a balloon,
/// which returns free memory to the host.
pub const MODULES: [&str; 7] =
    ["virtio_pci", "virtio_blk", "nd_pmem", "virtio_pmem", "virtio_balloon", "erofs", "overlay"];

/// The shell of a virtual machine.
pub struct Shell(BufReader<UnixStream>);

impl Shell {
    /// Connects to the socket of the second serial port of a machine that is ready. No command takes longer than `patience`.
    ///
    /// # Errors
    /// Returns the errors of connect(2).
    pub fn connect(socket: &Path, patience: Duration) -> io::Result<Self> {
        let stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(patience))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Runs a command of one line; returns its exit status and what it printed.
    ///
    /// # Errors
    /// Those of the socket; `UnexpectedEof` with what was printed if the machine ends.
    pub fn run(&mut self, command: &str) -> io::Result<(i32, String)> {
        writeln!(self.0.get_mut(), "{command}")?;
        let mut output = String::new();
        loop {
            let mut line = Vec::new();
            if self.0.read_until(b'\n', &mut line)? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{command}: {output}")));
            }
            let line = String::from_utf8_lossy(&line);
            // What is before may have no line's end.
            let Some((last, status)) = line.split_once(END) else {
                output.push_str(&line);
                continue;
            };
            output.push_str(last);
            return Ok((status.trim().parse().map_err(io::Error::other)?, output));
        }
    }
}
