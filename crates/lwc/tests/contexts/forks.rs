//! What becomes of contexts where the program forks.

use orrery_lwc::context::{Error, Spec, create};

use crate::support::{in_child, server};

pub(crate) fn a_forked_process_has_its_own() {
    let other = create(&Spec::new(), server(|word| word)).unwrap();
    let status = in_child(|| {
        assert_eq!(other.switch(0, &[]).unwrap_err(), Error::OtherProcess);
        let own = create(&Spec::new(), server(|word| word * 3)).unwrap();
        assert_eq!(own.switch(5, &[]).unwrap().word, 15);
        unsafe { libc::_exit(4) };
    });
    assert_eq!(libc::WEXITSTATUS(status), 4);
    assert_eq!(other.switch(2, &[]).unwrap().word, 2);
}
