//! At each instruction that a kernel may die at, its TCP connections are read whole, and what was moved by the call
//! that was under way is found: a real kernel is stopped after each instruction of its way through TCP, and read from
//! outside. SKIPPED where QEMU or the kernel's package cannot be had.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use orrery_kimage::{InetSocket, Kernel, Layout, OpenFile, Standing, Task, TcpConnection, open_memory};
use orrery_orthros_host::{Initramfs, KernelFiles, Machine, MachineConfig, command, load_program};

use super::io_progress;

const BOOT: Duration = Duration::from_secs(120);
/// Moves bytes over TCP to itself, on one processor.
const INIT: &str = r"#!/bin/busybox sh
/bin/busybox mkdir -p /proc /dev /run
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t tmpfs tmpfs /run
/bin/busybox ifconfig lo up mtu MTU
/bin/busybox touch /run/io-stress
/usr/bin/orrery-orthros-load io-stress &
/bin/busybox sleep 2
echo IT-FLOWS
/bin/busybox sleep 100000
";

/// Returns the machine, started; nothing, with the reason printed, where it cannot be had.
fn boot(directory: &Path, mtu: u32) -> Option<Machine> {
    if let Err(error) = command::require("qemu-system-x86_64", "qemu-system-x86") {
        orrery_testing::skipped!("{error}");
        return None;
    }
    let Some(busybox) = command::find("busybox") else {
        orrery_testing::skipped!("busybox is not installed");
        return None;
    };
    let program = load_program().unwrap();
    // Where other tests have it, too.
    let cache = program.ancestors().nth(2).unwrap().join("tmp/orthros-cache");
    let kernel = match KernelFiles::obtain(&cache) {
        Ok(kernel) => kernel,
        Err(error) => {
            orrery_testing::skipped!("no kernel to boot: {error}");
            return None;
        }
    };
    let initramfs = directory.join("initramfs");
    let mut archive = Initramfs::new();
    archive.copy(&busybox, "/bin/busybox").file("/init", INIT.replace("MTU", &mtu.to_string()), 0o755);
    archive.program(&program, "/usr/bin/orrery-orthros-load").unwrap();
    archive.write(&initramfs).unwrap();
    let config = MachineConfig {
        name: "guest".to_owned(),
        memory_mib: 256,
        cpus: 1,
        append: String::new(),
        initramfs,
        peer: None,
        extra: Vec::new(),
    };
    Some(Machine::start(&config, &kernel, directory).unwrap())
}

/// QEMU's stub for debuggers, by GDB's remote protocol (Debugging with GDB, appendix E), as far as it stops and steps.
struct Debugger(UnixStream);

/// The numbers of registers in it.
const RDI: usize = 5;
const RBP: usize = 6;
const RSP: usize = 7;
const RIP: usize = 16;
const RAX: usize = 0;
/// A call that takes more instructions is not followed further.
const LONGEST_CALL: usize = 20_000;

impl Debugger {
    fn connect(machine: &mut Machine, directory: &Path) -> Self {
        let at = directory.join("gdb");
        let listen = format!("gdbserver unix:{},server=on,wait=off", at.display());
        let answer = machine.qmp().unwrap().human(&listen).unwrap();
        let stream = UnixStream::connect(&at).unwrap_or_else(|error| panic!("{answer}: {error}"));
        let mut debugger = Self(stream);
        debugger.ask("?");
        // That it has stopped is reported without being asked, too.
        debugger.0.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        while debugger.0.read(&mut [0; 64]).is_ok() {}
        debugger.0.set_read_timeout(Some(BOOT)).unwrap();
        debugger
    }

    fn ask(&mut self, request: &str) -> String {
        let sum = request.bytes().fold(0_u8, u8::wrapping_add);
        self.0.write_all(format!("${request}#{sum:02x}").as_bytes()).unwrap();
        let mut answer = Vec::new();
        let mut piece = [0; 4096];
        loop {
            let count = self.0.read(&mut piece).unwrap();
            assert!(count > 0, "the stub is gone after {request}");
            answer.extend_from_slice(&piece[..count]);
            if let [before @ .., b'#', _, _] = &answer[..] {
                self.0.write_all(b"+").unwrap();
                let begin = before.iter().position(|&byte| byte == b'$').unwrap();
                return String::from_utf8(before[begin + 1..].to_vec()).unwrap();
            }
        }
    }

    fn registers(&mut self) -> Vec<u64> {
        let text = self.ask("g");
        let number = |index: usize| u64::from_str_radix(&text[index * 16..][..16], 16).unwrap();
        (0..=RIP).map(|index| number(index).swap_bytes()).collect()
    }

    fn run_to(&mut self, address: u64) {
        assert_eq!(self.ask(&format!("Z0,{address:x},1")), "OK");
        assert!(self.ask("c").starts_with("T05"));
        assert_eq!(self.ask(&format!("z0,{address:x},1")), "OK");
    }

    fn step(&mut self) {
        assert!(self.ask("s").starts_with("T05"));
    }
}

/// Returns where in a stream the first of these bytes is, as `orrery-orthros-load io-stress` has them.
fn place_of(bytes: &[u8]) -> Option<u64> {
    let number = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    (0..8).find_map(|at| {
        let first = number(at)?;
        (number(at + 8)? == first.wrapping_add(1)).then(|| first.wrapping_mul(8).wrapping_sub(at as u64))
    })
}

/// A connection of the pump's with itself.
struct End<'k> {
    socket: InetSocket,
    file: OpenFile<'k>,
    /// What to subtract from numbers for places in the stream that it sends, once it is known; and in the one that it
    /// receives.
    origins: [Option<u32>; 2],
}

impl End<'_> {
    /// Reads it, and compares its bytes with the streams.
    fn read(&mut self) -> Result<TcpConnection, String> {
        let tcp = self.file.tcp_connection().map_err(|error| error.to_string())?;
        let sent = (&tcp.unacknowledged, tcp.write_seq);
        let received = (&tcp.received, tcp.rcv_nxt);
        for ((bytes, end), origin) in [sent, received].into_iter().zip(&mut self.origins) {
            let first = end.wrapping_sub(u32::try_from(bytes.len()).unwrap());
            let found =
                place_of(bytes).map(|place| first.wrapping_sub(u32::try_from(place & 0xffff_ffff).unwrap()));
            let Some(origin) = *origin else {
                *origin = found;
                continue;
            };
            let place = u64::from(first.wrapping_sub(origin));
            let wrong = (place..).zip(bytes).find(|(place, byte)| {
                (place / 8).to_le_bytes()[usize::try_from(place % 8).unwrap()] != **byte
            });
            if let Some((at, _)) = wrong {
                return Err(format!("of {} bytes from {place} on that at {at} is wrong", bytes.len()));
            }
        }
        Ok(tcp)
    }

    /// Returns how far the program has come with the stream that it sends or receives.
    fn progress(&mut self, sends: bool) -> Result<u32, String> {
        let tcp = self.read()?;
        let unread = u32::try_from(tcp.received.len()).unwrap();
        Ok(if sends { tcp.write_seq } else { tcp.rcv_nxt.wrapping_sub(unread) })
    }
}

fn ends(kernel: &Kernel) -> Vec<End<'_>> {
    let processes = kernel.processes().found;
    let pump = processes.into_iter().find(|task| task.name().unwrap() == "orrery-orthros-").unwrap();
    let mut found: BTreeMap<_, End<'_>> = BTreeMap::new();
    for descriptor in pump.descriptors().found {
        let file = descriptor.file;
        if let Ok(Some(socket)) = file.inet_socket()
            && (socket.protocol, socket.state) == (6, 1)
        {
            let key = (socket.source_port, socket.destination_port);
            found.entry(key).or_insert(End { socket, file, origins: [None, None] });
        }
    }
    found.into_values().collect()
}

/// What is wrong, by the functions in which it was, and how often.
#[derive(Default)]
struct Wrong(BTreeMap<String, (usize, String)>);

impl Wrong {
    fn note(&mut self, kernel: &Kernel, instruction: u64, what: &str) {
        let start = kernel.symbols().function(instruction).unwrap_or(0);
        let name = kernel.symbols().name(start).unwrap_or("?").to_owned();
        let first = || (0, format!("+{:#x}: {what}", instruction.wrapping_sub(start)));
        self.0.entry(name).or_insert_with(first).0 += 1;
    }
}

/// Returns what the call returns that a thread is in, or will have moved when it is found like this.
fn moved(thread: &Task<'_>, standing: Standing) -> Result<u64, String> {
    let saved = thread.registers().map_err(|error| error.to_string())?;
    if saved.ax.cast_signed() != -i64::from(libc::ENOSYS) {
        return Ok(saved.ax);
    }
    let moved = io_progress::moved(thread, &saved, Some(standing)).map_err(|error| format!("{error:#}"))?;
    moved.ok_or_else(|| "it moves nothing".to_owned())
}

/// Follows a call through TCP, instruction by instruction, and returns how many there were. The connections are read after
/// those instructions that `looks` chooses by their numbers.
fn follow(
    kernel: &Kernel,
    debugger: &mut Debugger,
    ends: &mut [End<'_>],
    sends: bool,
    looks: impl Fn(usize) -> bool,
    wrong: &mut Wrong,
) -> usize {
    let function = if sends { "tcp_sendmsg" } else { "tcp_recvmsg" };
    debugger.run_to(kernel.symbols().address(function).unwrap());
    let sock = kernel.object("sock", debugger.registers()[RDI]).unwrap();
    let port = u16::try_from(sock.u32("__sk_common.skc_num").unwrap()).unwrap();
    let Some(own) = ends.iter().position(|end| end.socket.source_port == port) else { return 0 };
    let peer = ends.iter().position(|end| end.socket.destination_port == port).unwrap();
    let caller = kernel.running_on(0).unwrap();
    let before = ends[own].progress(sends).unwrap();
    for steps in 0..LONGEST_CALL {
        debugger.step();
        let registers = debugger.registers();
        let is_current = kernel.running_on(0).unwrap().object().address() == caller.object().address();
        if !is_current || registers[RIP] >> 63 == 0 {
            return steps;
        }
        if !looks(steps) {
            continue;
        }
        let mut note = |what: &str| wrong.note(kernel, registers[RIP], what);
        if let Err(why) = ends[peer].read() {
            note(&format!("the peer: {why}"));
        }
        let standing = Standing {
            instruction: registers[RIP],
            stack: registers[RSP],
            base: registers[RBP],
            result: registers[RAX],
        };
        match (ends[own].progress(sends), moved(&caller, standing)) {
            (Ok(now), Ok(moved)) if moved == u64::from(now.wrapping_sub(before)) => {}
            (Ok(now), found) => {
                note(&format!("{} were moved, and {found:?} is found", now.wrapping_sub(before)))
            }
            (Err(why), _) => note(&why),
        }
    }
    LONGEST_CALL
}

/// On a device with short packets large ones are cut, and dropped piece by piece. `ORRERY_INSTANTS` is the number of calls
/// each way that are followed on each device. Without it, it is one call, and the connections are read after each seventh
/// instruction only: reading after each takes minutes.
#[test]
fn connections_are_read_whole_after_each_instruction() {
    let all: Option<usize> = std::env::var("ORRERY_INSTANTS").ok().map(|calls| calls.parse().unwrap());
    let (calls, stride) = all.map_or((1, 7), |calls| (calls, 1));
    for mtu in [65536, 1500] {
        let directory = tempfile::tempdir().unwrap();
        let Some(mut machine) = boot(directory.path(), mtu) else { return };
        machine.wait_for_console("IT-FLOWS", BOOT).unwrap();
        let memory = open_memory(&machine.file("ram"), Layout::Q35).unwrap();
        let kernel = Kernel::open(Box::new(memory)).unwrap();
        let mut debugger = Debugger::connect(&mut machine, directory.path());
        let (mut ends, mut wrong, mut steps) = (ends(&kernel), Wrong::default(), 0);
        for call in 0..2 * calls {
            let looks = |step: usize| (step + call).is_multiple_of(stride);
            steps += follow(&kernel, &mut debugger, &mut ends, call % 2 == 0, looks, &mut wrong);
        }
        machine.kill();
        assert!(wrong.0.is_empty(), "after {steps} instructions: {:#?}", wrong.0);
        assert!(steps > 1000, "only {steps} instructions were followed");
    }
}
