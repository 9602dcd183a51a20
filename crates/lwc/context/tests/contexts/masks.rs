//! Calls that are put together of two contexts: memory, descriptors and credentials are each the caller's or the
//! target's.

use std::fs::{File, Permissions, create_dir, set_permissions, write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::PermissionsExt;

use orrery_context::{Context, Error, FromCaller, Rights, Spec, create};
use rustix::process::geteuid;

use crate::pages::Pages;
use crate::support::{OWN_MEMORY, call_number, only, set_users, uname};

/// Of each kind there is one of the caller's and one of the target's.
const WHOSE: [&str; 2] = ["target", "caller"];

/// A program with a context that have different things by the same names: behind the number, a directory with the owner's
/// name; at the address, a text with the owner's name; and files that only the caller's user may read.
struct Scene {
    _place: tempfile::TempDir,
    folder: File,
    memory: Pages,
    target: Context,
    privileged: bool,
}

impl Scene {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        for table in WHOSE {
            let folder = place.path().join(table);
            create_dir(&folder).unwrap();
            set_permissions(&folder, Permissions::from_mode(0o755)).unwrap();
            for memory in WHOSE {
                let file = folder.join(memory);
                write(&file, format!("{table}/{memory}")).unwrap();
                set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
            }
        }
        let privileged = geteuid().is_root();
        let folder = File::open(place.path().join("caller")).unwrap();
        let theirs = File::open(place.path().join("target")).unwrap();
        let (number, memory) = (folder.as_raw_fd(), Pages::new(1));
        let theirs_too = theirs.as_raw_fd();
        memory.put(b"caller");
        let spec = Spec::new().trap(true).withhold(&only(libc::SYS_uname));
        let target = create(&spec, move |start| {
            memory.put(b"target");
            // SAFETY: takes numbers only. What went by the second one is the caller's directory, which only the caller
            // uses by it.
            assert_eq!(unsafe { libc::dup2(theirs_too, number) }, number);
            if privileged {
                assert!(set_users(65534, 65534, 65534));
            }
            let mut arrival = start.arrival;
            loop {
                if arrival.word == 1 {
                    let _ = uname();
                }
                arrival = arrival.caller.switch(0, &memory.get::<6>()).unwrap();
            }
        })
        .unwrap();
        assert_eq!(target.switch(0, &[]).unwrap().bytes, b"target");
        Self { _place: place, folder, memory, target, privileged }
    }

    fn call(&self, own: FromCaller, number: libc::c_long, arguments: [u64; 6]) -> Result<i64, Error> {
        // SAFETY: calls that open a file of a name, or move as many bytes as they are told to a buffer of that size or
        // the page.
        unsafe { self.target.syscall(own, call_number(number), arguments) }
    }

    /// Opens the file that has the name at the address, in the directory behind the number.
    fn open(&self, own: FromCaller) -> Result<i64, Error> {
        let folder = self.folder.as_raw_fd().unsigned_abs().into();
        let how = (libc::O_RDONLY | libc::O_CLOEXEC).unsigned_abs().into();
        self.call(own, libc::SYS_openat, [folder, self.memory.address() as u64, how, 0, 0, 0])
    }

    /// Returns what is in a file that was opened: in our table, or in the target's.
    fn content(&self, own: FromCaller, number: i64) -> String {
        let mut bytes = [0; 100];
        let length = if own.descriptors {
            use std::io::Read;
            // SAFETY: it was opened for this, and is nobody's yet.
            let mut file = unsafe { File::from_raw_fd(i32::try_from(number).unwrap()) };
            file.read(&mut bytes).unwrap()
        } else {
            let address = bytes.as_mut_ptr().expose_provenance() as u64;
            let arguments = [number.cast_unsigned(), address, bytes.len() as u64, 0, 0, 0];
            usize::try_from(self.call(OWN_MEMORY, libc::SYS_read, arguments).unwrap()).unwrap()
        };
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    fn try_all(&self) {
        for mask in 0..8_usize {
            let whose = |bit: usize| mask >> bit & 1;
            let own =
                FromCaller { memory: whose(0) == 1, descriptors: whose(1) == 1, credentials: whose(2) == 1 };
            let opened = self.open(own).unwrap_or_else(|error| panic!("{own:?}: {error}"));
            if self.privileged && !own.credentials {
                assert_eq!(opened, -i64::from(libc::EACCES), "{own:?}");
                assert!(geteuid().is_root(), "ours are ours again");
                continue;
            }
            assert!(opened >= 0, "{own:?}: {opened}");
            let expected = format!("{}/{}", WHOSE[whose(1)], WHOSE[whose(0)]);
            assert_eq!(self.content(own, opened), expected, "{own:?}");
        }
    }
}

const OWN_DESCRIPTORS: FromCaller = FromCaller { memory: false, descriptors: true, credentials: true };

pub(crate) fn a_parked_contexts_part_of_a_call_is_any() {
    let scene = Scene::new();
    scene.try_all();
    // What a call with our descriptors reads comes to be in its memory.
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"for it", 0).unwrap();
    let number = u64::from(file.as_raw_fd().unsigned_abs());
    let read = [number, scene.memory.address() as u64, 6, 0, 0, 0];
    assert_eq!(scene.call(OWN_DESCRIPTORS, libc::SYS_pread64, read), Ok(6));
    assert_eq!(scene.target.switch(0, &[]).unwrap().bytes, b"for it");
    assert_eq!(&scene.memory.get::<6>(), b"caller");
    let absent = [number, 8, 6, 0, 0, 0];
    assert!(matches!(scene.call(OWN_DESCRIPTORS, libc::SYS_pwrite64, absent), Err(Error::Memory { .. })));
    // It takes rights to the memory, and to descriptors, beside the one to the call.
    let calls = only(libc::SYS_openat).or(&only(libc::SYS_pread64));
    scene.target.restrict_to(&Rights::none().calls(&calls)).unwrap();
    assert!(matches!(scene.call(OWN_DESCRIPTORS, libc::SYS_pread64, read), Err(Error::Denied { .. })));
    assert!(matches!(scene.open(OWN_DESCRIPTORS), Err(Error::Denied { .. })));
    if scene.privileged {
        let own = FromCaller { credentials: true, ..OWN_MEMORY };
        assert!(matches!(scene.open(own), Err(Error::Denied { .. })));
    }
    assert_eq!(scene.target.switch(0, &[]).unwrap().bytes, b"for it");
}

pub(crate) fn a_stopped_contexts_part_of_a_call_is_any() {
    let scene = Scene::new();
    if !scene.privileged {
        orrery_testing::skipped!("only root borrows descriptors of a context that is closed to debuggers");
        return;
    }
    assert!(scene.target.switch(1, &[]).unwrap().call.is_some());
    scene.try_all();
    // A number that is none there is not one of ours.
    let file = tempfile::tempfile().unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"ours", 0).unwrap();
    // High up, where the target has nothing of its own.
    let copy = rustix::io::fcntl_dupfd_cloexec(&file, 900).unwrap();
    let number = u64::from(copy.as_raw_fd().unsigned_abs());
    let mut byte = 0_u8;
    let read = [number, (&raw mut byte).expose_provenance() as u64, 1, 0, 0, 0];
    let with_rights = FromCaller { credentials: true, ..OWN_MEMORY };
    assert_eq!(scene.call(with_rights, libc::SYS_pread64, read), Ok(-i64::from(libc::EBADF)));
    assert_eq!(scene.target.switch(0, &[]).unwrap().call, None);
    // Nor is it where it is parked.
    assert_eq!(scene.call(with_rights, libc::SYS_pread64, read), Ok(-i64::from(libc::EBADF)));
    assert_eq!(byte, 0);
}
