//! Pieces of files: shown by descriptor, read by the store.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use orrery_orc_client::protocol::{EXECUTABLE, FileRange};
use orrery_orc_client::{Client, Refusal};

use crate::guest::{Guest, TALK, Workshop};
use crate::{Store, bytes, refusal};

const PAGE: u64 = 4096;

fn ask(client: &Client, file: &File, flags: u32) -> Result<(u64, bool), Refusal> {
    let length = file.metadata().unwrap().len().next_multiple_of(PAGE);
    let piece = FileRange { flags, offset: 0, length };
    let (answers, memories) = client.files(&[(piece, file.as_fd())]).unwrap();
    match answers[0].refusal {
        Some(refusal) => Err(refusal),
        None => Ok((rustix::fs::fstat(&memories[0]).unwrap().st_ino, answers[0].duplicate)),
    }
}

#[test]
fn equal_files_in_different_trees_are_one_object() {
    let store = Store::new(&[]);
    let client = store.client();
    let content = bytes(300_000, 1);
    let trees = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    for tree in 0..4 {
        let path = trees.path().join(format!("lib{tree}.so"));
        fs::write(&path, &content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let file = File::open(&path).unwrap();
        let (inode, fresh) = ask(&client, &file, EXECUTABLE).unwrap();
        assert!(fresh, "read for the first time");
        assert_eq!(ask(&client, &file, EXECUTABLE).unwrap(), (inode, false));
        seen.push(inode);
    }
    assert!(seen.iter().all(|inode| *inode == seen[0]));
    let objects = client.report().unwrap().objects;
    assert_eq!(objects.len(), 1);
    assert!(objects[0].executable && objects[0].length == 303_104);
}

#[test]
fn a_file_that_changes_is_another_object() {
    let store = Store::new(&[]);
    let client = store.client();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes(5000, 2)).unwrap();
    let (before, _) = ask(&client, &file, 0).unwrap();
    // As long as before: only the time of the change tells.
    std::thread::sleep(std::time::Duration::from_millis(20));
    rustix::io::pwrite(&file, b"changed", 100).unwrap();
    let (after, fresh) = ask(&client, &file, 0).unwrap();
    assert!(fresh && after != before);
    assert_eq!(client.report().unwrap().objects.len(), 2, "the old one stays for those who hold it");
}

#[test]
fn code_comes_from_files_that_others_cannot_write() {
    let store = Store::new(&[]);
    let client = store.client();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("code");
    fs::write(&path, bytes(5000, 3)).unwrap();
    let file = File::open(&path).unwrap();
    for mode in [0o666, 0o664, 0o646, 0o777] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(ask(&client, &file, EXECUTABLE), Err(Refusal::Denied), "{mode:o}");
    }
    let (data, _) = ask(&client, &file, 0).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    // The same bytes, which become executable for those who showed such a file.
    assert_eq!(ask(&client, &file, EXECUTABLE).unwrap().0, data);
    let none = Store::new(&["--executables", "never"]);
    assert_eq!(ask(&none.client(), &file, EXECUTABLE), Err(Refusal::Denied));
}

#[test]
fn descriptors_must_show_what_is_asked_for() {
    let store = Store::new(&[]);
    let client = store.client();
    let path = store.path().join("file");
    fs::write(&path, bytes(5000, 4)).unwrap();
    let named = rustix::fs::open(&path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(ask(&client, &named.into(), 0), Err(Refusal::Descriptor));
    let written = File::options().append(true).open(&path).unwrap();
    assert_eq!(ask(&client, &written, 0), Err(Refusal::Descriptor));
    let proc = File::open("/proc/self/status").unwrap();
    let piece = FileRange { flags: 0, offset: 0, length: PAGE };
    let (answers, _) = client.files(&[(piece, proc.as_fd())]).unwrap();
    assert!(answers[0].refusal.is_some());
    // Fewer descriptors than pieces: nothing of it is done.
    let file = File::open(&path).unwrap();
    let pair = [(piece, file.as_fd()), (FileRange { length: 3, ..piece }, file.as_fd())];
    let (answers, memories) = client.files(&pair).unwrap();
    assert_eq!((answers[0].refusal, answers[1].refusal), (None, Some(Refusal::Malformed)));
    assert_eq!(memories.len(), 1);
    assert_eq!(refusal(client.files(&vec![pair[0]; 65])), Refusal::Malformed);
}

/// Large code, many pages of it run.
fn large_program(workshop: &Workshop) -> PathBuf {
    let source = "__asm__(\".text\\n.skip 0x900000, 0xc3\\n\"); int answer(void) { return 42; }
         int touch(void) {
             unsigned long sum = 0;
             for (char *at = (char *)answer - 0x800000; at < (char *)answer; at += 4096) sum += *(volatile char *)at;
             return sum != 1;
         }";
    workshop.library("liblarge.so", source, &[]);
    let source = format!(
        "{TALK} int answer(void), touch(void); int main(void) {{ for (;;) {{ say(answer() * touch()); hear(); }} }}"
    );
    workshop.program("main", &source, &["-L$LIB", "-llarge", "-Wl,-rpath,$LIB"])
}

/// Bytes of the library's code that are mapped by huge pages.
fn mapped_hugely(pid: u32) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let code =
        text.split("VmFlags").filter(|part| part.contains(" r-xp ") && part.contains("orc:liblarge.so"));
    let fields = code.flat_map(str::lines).filter(|line| line.contains("PmdMapped"));
    fields.map(|line| line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10).sum()
}

#[test]
fn large_code_lies_in_huge_pages() {
    let (store, workshop) = (Store::new(&["--huge-pages"]), Workshop::new());
    let _ = store.client();
    let program = large_program(&workshop);
    let mut guests = [(); 2].map(|()| Guest::start(&store, &workshop, &program));
    for guest in &mut guests {
        assert_eq!(guest.number(), 42);
        let reasons = guest.reasons("orc:liblarge.so", "r-xp");
        assert!(reasons.iter().all(|reason| reason.starts_with("an object")), "{reasons:?}");
        let name =
            &guest.explain().into_iter().find(|row| row.name.contains("orc:liblarge.so")).unwrap().name;
        assert!(name.starts_with("/memfd:orc:"), "sealed memory, although others lie on disk: {name}");
    }
    let inodes = [0, 1].map(|number: usize| crate::unmodified::code(guests[number].pid(), "liblarge.so"));
    assert_eq!(inodes[0], inodes[1]);
    // Programs that run already have them, too. Where memory is in too many pieces the kernel has none to give.
    let has_some = (0..30).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert_eq!(guests[0].go_on(), 42);
        mapped_hugely(guests[0].pid()) > 0
    });
    if !has_some {
        orrery_testing::skipped!("the kernel had no huge pages to give just now");
    }
    // A store that was killed has it still, and the programs notice nothing.
    let server = store.server();
    crate::signal(server, libc::SIGKILL);
    crate::eventually("a new store", || store.server() != server);
    let mut third = Guest::start(&store, &workshop, &program);
    assert_eq!(third.number(), 42);
    assert_eq!(crate::unmodified::code(third.pid(), "liblarge.so"), inodes[0]);
}

#[test]
fn without_the_right_to_huge_pages_and_disks_small_ones_in_memory_serve() {
    use std::os::unix::process::CommandExt as _;

    if !rustix::process::geteuid().is_root() {
        orrery_testing::skipped!("only root can become another user");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(directory.path(), Some(65_534), None).unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let said = directory.path().join("said");
    let public = orrery_testing::PublicDirectory::new();
    let orrery = public.copy(env!("CARGO_BIN_EXE_orrery"));
    let options = ["--huge-pages", "--disk", "/proc/nowhere"];
    let mut command = crate::command_by(&orrery, directory.path(), &options);
    let supervisor = command.uid(65_534).stderr(File::create(&said).unwrap()).spawn().unwrap();
    let store = Store { directory, supervisor };
    let path = store.path().join("code");
    fs::write(&path, bytes(8 << 20, 3)).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let code = File::open(&path).unwrap();
    let path = store.path().to_owned();
    let seals = std::thread::spawn(move || {
        // SAFETY: the bare system call changes this thread alone, which ends soon.
        assert_eq!(unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) }, 0);
        let client = crate::connect(&path);
        let piece = FileRange { flags: EXECUTABLE, offset: 0, length: 8 << 20 };
        let (answers, memories) = client.files(&[(piece, code.as_fd())]).unwrap();
        assert_eq!(answers[0].refusal, None);
        rustix::fs::fcntl_get_seals(&memories[0]).unwrap()
    });
    assert!(seals.join().unwrap().contains(rustix::fs::SealFlags::WRITE));
    let said = fs::read_to_string(said).unwrap();
    assert!(said.contains("/proc/nowhere"), "{said}");
}

#[test]
fn large_files_become_objects_on_disk() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = Store::new(&["--disk", disk.path().to_str().unwrap()]);
    let client = store.client();
    let content = bytes(3 << 20, 7);
    let trees = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    for tree in 0..3 {
        let path = trees.path().join(format!("lib{tree}.so"));
        fs::write(&path, &content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let piece = FileRange { flags: EXECUTABLE, offset: 0, length: 3 << 20 };
        let (answers, memories) = client.files(&[(piece, File::open(&path).unwrap().as_fd())]).unwrap();
        assert!(answers[0].refusal.is_none() && answers[0].duplicate);
        seen.push(memories.into_iter().next().unwrap());
    }
    let inodes: Vec<_> = seen.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_ino).collect();
    assert!(inodes.iter().all(|inode| *inode == inodes[0]), "{inodes:?}");
    if rustix::fs::fcntl_get_seals(&seen[0]).is_ok() {
        orrery_testing::skipped!("no file can be made immutable here: the store took memory");
        return;
    }
    // Nobody can write to it, not even the superuser, and only its trust domain finds it.
    let again = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&seen[0]));
    assert!(File::options().write(true).open(again).is_err());
    let others: Vec<_> = fs::read_dir(disk.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(others.iter().all(|name| name == "objects" || name == "drafts"), "{others:?}");
    assert_eq!(fs::read_dir(disk.path().join("drafts")).unwrap().count(), 0);
    let mut there = vec![0; content.len()];
    rustix::io::pread(&seen[0], &mut there, 0).unwrap();
    assert!(there == content);
    // What nobody maps leaves memory after a while.
    let resident = || client.report().unwrap().objects[0].resident;
    assert!(resident() > 0);
    crate::eventually("its pages go", || resident() == 0);
    // A store that was killed has it still.
    let server = store.server();
    crate::signal(server, libc::SIGKILL);
    crate::eventually("a new store", || store.server() != server);
    let piece = FileRange { flags: EXECUTABLE, offset: 0, length: 3 << 20 };
    let file = File::open(trees.path().join("lib0.so")).unwrap();
    let (_, memories) = client.files(&[(piece, file.as_fd())]).unwrap();
    assert_eq!(rustix::fs::fstat(&memories[0]).unwrap().st_ino, inodes[0]);
    // Programs take it for what it is.
    if std::path::Path::new(crate::unmodified::PYTHON).exists() {
        let python = crate::unmodified::Python::start(&store);
        let maps = fs::read_to_string(format!("/proc/{}/maps", python.pid())).unwrap();
        assert!(maps.lines().any(|line| line.contains(" r-xp ") && line.contains("/orc:python3")), "{maps}");
    }
}

#[test]
fn of_a_large_object_what_is_mapped_stays_in_memory_and_little_else() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = Store::new(&["--disk", disk.path().to_str().unwrap()]);
    let client = store.client();
    let (length, touched) = (8 << 20, [0_usize, 3 << 20, (7 << 20) + 70_000]);
    let path = disk.path().join("library");
    fs::write(&path, bytes(length, 11)).unwrap();
    let piece = FileRange { flags: 0, offset: 0, length: length as u64 };
    let (_, memories) = client.files(&[(piece, File::open(&path).unwrap().as_fd())]).unwrap();
    if rustix::fs::fcntl_get_seals(&memories[0]).is_ok() {
        orrery_testing::skipped!("no file can be made immutable here: the store took memory");
        return;
    }
    let (access, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { rustix::mm::mmap(std::ptr::null_mut(), length, access, flags, &memories[0], 0) };
    let start = start.unwrap().cast::<u8>();
    for place in touched {
        // SAFETY: within the mapping, of an object that nobody can cut short.
        std::hint::black_box(unsafe { start.add(place).read_volatile() });
    }
    // What one fault maps, for each of them, is in one or two portions.
    let most = touched.len() as u64 * 2 * (64 << 10);
    let resident = || client.report().unwrap().objects[0].resident;
    crate::eventually("the rest goes", || (1..=most).contains(&resident()));
    // SAFETY: the mapping is this test's, and not used any more.
    unsafe { rustix::mm::munmap(start.cast(), length) }.unwrap();
}

#[test]
fn what_programs_open_all_the_time_stays_in_memory_until_they_do_no_more() {
    let disk = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = Store::new(&["--disk", disk.path().to_str().unwrap()]);
    let client = store.client();
    let length = 4 << 20;
    let path = disk.path().join("library");
    fs::write(&path, bytes(length, 12)).unwrap();
    let piece = FileRange { flags: 0, offset: 0, length: length as u64 };
    client.files(&[(piece, File::open(&path).unwrap().as_fd())]).unwrap();
    let directories = fs::read_dir(disk.path().join("objects")).into_iter().flatten().flatten();
    let mut objects =
        directories.flat_map(|directory| fs::read_dir(directory.path()).into_iter().flatten().flatten());
    let Some(object) = objects.find(|entry| entry.file_name().to_string_lossy().starts_with("orc:library"))
    else {
        orrery_testing::skipped!("no file can be made immutable here, so objects have no names");
        return;
    };
    let resident = || client.report().unwrap().objects[0].resident;
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(8) {
        // Short of memory the kernel may take a little by itself.
        let there = resident();
        assert!(there > length as u64 / 2, "{there} bytes are left after {:?}", begin.elapsed());
        assert_eq!(fs::read(object.path()).unwrap().len(), length);
        std::thread::sleep(Duration::from_millis(250));
    }
    crate::eventually("nobody needs it", || resident() < length as u64 / 8);
}
