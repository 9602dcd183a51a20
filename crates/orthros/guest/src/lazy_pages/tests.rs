//! This process plays a restored one, and criu as well.

use std::os::fd::AsFd as _;
use std::sync::mpsc::channel;

use orrery_sys::PageRange;
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap_fixed, munmap};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::*;

const SIZE: usize = 4096;
const PAGES: usize = 128;
/// Pages from here on were never touched.
const TOUCHED: usize = 100;

/// Memory that is dead: each page begins with its number.
struct Dead(Vec<u8>);

impl Dead {
    fn new() -> Self {
        let mut bytes = vec![0; 1024 * SIZE];
        for (number, page) in (1_u64..).zip(bytes.chunks_mut(SIZE)) {
            page[..8].copy_from_slice(&number.to_le_bytes());
        }
        Self(bytes)
    }
}

impl PageSource for Dead {
    fn place(&self, physical: u64, length: usize) -> Option<*const u8> {
        let start = usize::try_from(physical).ok()?;
        Some(self.0.get(start..start + length)?.as_ptr())
    }
}

/// Returns where a page of the process is in the dead memory: some follow each other, some do not.
fn place(page: usize) -> usize {
    if page % 10 < 6 { page } else { 900 - page }
}

/// Says what criu says of a process.
fn introduce(criu: &mut UnixStream, pid: i32, uffd: &MissingPages) {
    criu.write_all(&pid.to_ne_bytes()).unwrap();
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut room);
    let descriptors = [uffd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    sendmsg(&criu, &[std::io::IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
}

/// The process' memory.
struct Memory(*mut u64);

impl Memory {
    fn at(&self, page: usize) -> *mut u64 {
        self.0.wrapping_add(page * SIZE / size_of::<u64>())
    }

    /// The number that a page begins with.
    fn number(&self, page: usize) -> u64 {
        // SAFETY: the tests ask about pages that are mapped.
        unsafe { self.at(page).read_volatile() }
    }
}

/// Returns what a page that was touched begins with.
fn known(page: usize) -> u64 {
    place(page) as u64 + 1
}

#[test]
fn a_process_gets_its_pages_whatever_it_does_meanwhile() {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let map = |pages: usize| {
        // SAFETY: a new mapping at a place of the kernel's choice disturbs nothing.
        unsafe { mmap_anonymous(std::ptr::null_mut(), pages * SIZE, protection, MapFlags::PRIVATE) }.unwrap()
    };
    let memory = Memory(map(PAGES).cast());
    let Ok(uffd) = MissingPages::open() else {
        orrery_testing::skipped!("this machine has no userfaultfd that reports forks");
        return;
    };
    // SAFETY: the server below supplies the pages.
    unsafe { uffd.register(PageRange::covering(memory.0.expose_provenance(), PAGES * SIZE)) }.unwrap();
    let directory = std::env::temp_dir().join(format!("orrery-lazy-pages-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let mut pending = PendingPages::default();
    for page in 0..TOUCHED {
        pending.add(PageRun {
            address: memory.at(page).expose_provenance() as u64,
            physical: (place(page) * SIZE) as u64,
            length: PAGE,
        });
    }
    let mut lazy = LazyPages::default();
    lazy.spaces.insert(7, pending);
    assert_eq!(lazy.pages(), TOUCHED as u64);
    let (sender, heard) = channel();
    let server = lazy.listen(Arc::new(Dead::new()), &directory).unwrap();
    let server = server.start(Box::new(move |said| sender.send(format!("{said:?}")).unwrap()));
    let mut criu = UnixStream::connect(directory.join(SOCKET)).unwrap();
    criu.write_all(&(-8_i32).to_ne_bytes()).unwrap();
    introduce(&mut criu, 7, &uffd);
    drop(uffd);
    // A thread may want its memory before all processes are made.
    assert_eq!(memory.number(3), known(3));
    criu.write_all(&FINISHED.to_ne_bytes()).unwrap();
    // Given back; moved; unmapped; never touched.
    // SAFETY: all of this is the test's own mapping, and nobody refers to it.
    unsafe { madvise(memory.at(50).cast(), 2 * SIZE, Advice::LinuxDontNeed) }.unwrap();
    assert_eq!([memory.number(50), memory.number(51), memory.number(52)], [0, 0, known(52)]);
    let moved = Memory(map(8).cast());
    // SAFETY: both ranges are the test's own mappings, and nothing refers to them.
    unsafe { mremap_fixed(memory.at(16).cast(), 8 * SIZE, 8 * SIZE, MremapFlags::MAYMOVE, moved.0.cast()) }
        .unwrap();
    // SAFETY: the range is the test's own mapping, and nothing refers to it.
    unsafe { munmap(memory.at(40).cast(), 4 * SIZE) }.unwrap();
    assert_eq!((moved.number(2), memory.number(TOUCHED + 5)), (known(18), 0));
    // A child waits for the same pages. The kernel makes it once the thread that brings them has heard of it, which
    // allocates: so this is no fork(3), which would hold the allocator's locks meanwhile.
    // SAFETY: the child only reads memory and ends.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
    let child = libc::pid_t::try_from(child).unwrap();
    if child == 0 {
        let right = (60..90).all(|page| memory.number(page) == known(page)) && moved.number(7) == known(23);
        // SAFETY: it runs nothing of this program's at its end.
        unsafe { libc::_exit(i32::from(!right)) };
    }
    let mut status = 0;
    // SAFETY: `status` is writable; the child is ours.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "a child has found something else");
    assert_eq!(memory.number(70), known(70), "what the child got, the parent gets as well");
    // No process has this number: nobody is killed should it fail.
    server.push_remaining(i32::MAX).unwrap();
    let said = heard.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert!(said.starts_with("LazyPagesDone { pages: 100"), "{said}");
    // Nobody brings anything any more.
    for page in (0..PAGES).filter(|page| !(16..24).contains(page) && !(40..44).contains(page)) {
        let wanted = if (50..52).contains(&page) || page >= TOUCHED { 0 } else { known(page) };
        assert_eq!(memory.number(page), wanted, "page {page}");
    }
    for page in 0..8 {
        assert_eq!(moved.number(page), known(16 + page), "moved page {page}");
    }
    fs::remove_dir_all(&directory).unwrap();
}

/// The kernel dies with the process that brings memory, if that fails: where nothing runs yet, criu's death is no
/// reason for it.
#[test]
fn criu_may_die_before_all_is_made_and_nobody_else_does() {
    let directory = std::env::temp_dir().join(format!("orrery-gone-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    for words in [&[][..], &[-8], &[-8, 7]] {
        let mut lazy = LazyPages::default();
        lazy.spaces.insert(7, PendingPages::default());
        let server = lazy.listen(Arc::new(Dead::new()), &directory).unwrap();
        let server = server.start(Box::new(|said| panic!("nothing is to be reported, and not {said:?}")));
        let mut criu = UnixStream::connect(directory.join(SOCKET)).unwrap();
        for word in words {
            // The last one is announced without its descriptor.
            criu.write_all(&i32::to_ne_bytes(*word)).unwrap();
        }
        drop(criu);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!server.thread.is_finished(), "descriptors are closed before what was made is gone");
        server.abandon();
    }
    // A service that was made without its memory is another matter.
    let (sender, heard) = channel();
    let server = LazyPages::default().listen(Arc::new(Dead::new()), &directory).unwrap();
    let server = server.start(Box::new(move |said| sender.send(format!("{said:?}")).unwrap()));
    drop(UnixStream::connect(directory.join(SOCKET)).unwrap());
    server.push_remaining(i32::MAX).unwrap();
    let said = heard.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    assert!(said.contains("the service is lost") && said.contains("criu has gone"), "{said}");
    fs::remove_dir_all(&directory).unwrap();
}
