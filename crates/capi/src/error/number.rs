//! The errno of each error of the crates beneath, as the headers document it.

use std::ffi::c_int;

use orrery_context::Error as ContextError;
use orrery_domain::Error as DomainError;
use orrery_memory::Error as MemoryError;
use orrery_orbit::{AreaError, Error as OrbitError};
use orrery_orc_client::{Error as ObjectError, Refusal};
use orrery_orc_instance::Error as InstanceError;
use orrery_rollback::Error as RollbackError;
use orrery_sessions::Error as SessionsError;
use orrery_upcall::UpcallError;
use orrery_vault::shared::Error as VaultError;

/// An error that C programs receive as an errno and a text.
pub(crate) trait ToErrno: std::error::Error {
    /// Returns the errno that the headers document for this error.
    fn errno(&self) -> c_int;
}

impl<E: ToErrno> ToErrno for &E {
    fn errno(&self) -> c_int {
        (**self).errno()
    }
}

impl ToErrno for RollbackError {
    fn errno(&self) -> c_int {
        match self {
            RollbackError::Nested => libc::EBUSY,
            RollbackError::WrongThread { .. } => libc::EPERM,
            RollbackError::OtherProcess { .. } => libc::ECHILD,
            RollbackError::SignalHandler | RollbackError::ShadowStack => libc::ENOTSUP,
            RollbackError::NotAlone { .. } | RollbackError::Threads { .. } => libc::EAGAIN,
            RollbackError::NoSnapshot { .. } => libc::ENOENT,
            RollbackError::Value { .. } => libc::EINVAL,
            RollbackError::System(error) => error.errno.raw_os_error(),
            RollbackError::Memory(error) => error.errno(),
            _ => libc::EIO,
        }
    }
}

impl ToErrno for UpcallError {
    fn errno(&self) -> c_int {
        match self {
            UpcallError::NoExecutive => libc::ENOTSUP,
            UpcallError::Filtered | UpcallError::OtherThread(_) => libc::EPERM,
            UpcallError::Busy => libc::EBUSY,
            UpcallError::NotRegistered => libc::ENOENT,
            UpcallError::Stack(_) => libc::EINVAL,
            UpcallError::Refused(_) => libc::EACCES,
            UpcallError::Reply => libc::EPROTO,
            UpcallError::Connect { cause, .. } | UpcallError::System { cause, .. } => {
                cause.raw_os_error().unwrap_or(libc::EIO)
            }
            _ => libc::EIO,
        }
    }
}

impl ToErrno for ContextError {
    fn errno(&self) -> c_int {
        match self {
            ContextError::Busy => libc::EBUSY,
            ContextError::NoThread { .. } => libc::EPERM,
            ContextError::ThreadEnded { .. } => libc::EOWNERDEAD,
            ContextError::OtherProcess | ContextError::NotTheRoot => libc::ECHILD,
            ContextError::TooManyThreads { .. } => libc::EAGAIN,
            ContextError::NoContext { .. } => libc::EBADF,
            ContextError::Itself { .. } => libc::EDEADLK,
            ContextError::Gone { .. } => libc::ESRCH,
            ContextError::Died { .. } | ContextError::Orphaned => libc::EOWNERDEAD,
            ContextError::TimedOut | ContextError::Silent { .. } => libc::ETIMEDOUT,
            ContextError::TooLong { .. } => libc::EMSGSIZE,
            ContextError::Full { .. } => libc::ENOSPC,
            ContextError::Denied { .. } | ContextError::CallDenied { .. } => libc::EACCES,
            ContextError::Stopped { .. } => libc::EINPROGRESS,
            ContextError::NoCall { .. } => libc::ENOMSG,
            ContextError::CallUnknown { .. } => libc::ENOSYS,
            ContextError::RootLimit
            | ContextError::Unaligned { .. }
            | ContextError::Overlap { .. }
            | ContextError::Unmet { .. }
            | ContextError::Memory { .. } => libc::EINVAL,
            ContextError::Birth { errno, .. } => errno.raw_os_error(),
            ContextError::System(error) => error.errno.raw_os_error(),
            _ => libc::EIO,
        }
    }
}

impl ToErrno for SessionsError {
    fn errno(&self) -> c_int {
        match self {
            SessionsError::Exhausted { .. } => libc::EAGAIN,
            SessionsError::NoSession { .. } => libc::ENOENT,
            SessionsError::Setup(_) => libc::ENOTSUP,
            SessionsError::NoTemplate(_) => libc::EOWNERDEAD,
            SessionsError::Descriptors => libc::EMFILE,
            SessionsError::Context(error) => error.errno(),
            SessionsError::System(error) => error.errno.raw_os_error(),
            _ => libc::EIO,
        }
    }
}

impl ToErrno for MemoryError {
    fn errno(&self) -> c_int {
        match self {
            MemoryError::System(error) | MemoryError::Tracker { cause: error, .. } => {
                error.errno.raw_os_error()
            }
            MemoryError::AddressSpace { .. } | MemoryError::Memory { .. } => libc::ENOMEM,
            MemoryError::Store { .. } => libc::ENOSPC,
            MemoryError::TrackerName | MemoryError::Keep { .. } => libc::EINVAL,
            MemoryError::NoSnapshot { .. } => libc::ENOENT,
            MemoryError::PageSize { .. } => libc::ENOTSUP,
            _ => libc::EIO,
        }
    }
}

impl ToErrno for OrbitError {
    fn errno(&self) -> c_int {
        match self {
            OrbitError::Domain(error) => error.errno(),
            OrbitError::Area(error) => error.errno(),
            OrbitError::Fault { .. }
            | OrbitError::NotRun { .. }
            | OrbitError::Init { .. }
            | OrbitError::Destroyed { .. } => libc::ESRCH,
            OrbitError::Dead { .. }
            | OrbitError::Arguments { .. }
            | OrbitError::NoFunction { .. }
            | OrbitError::NoEntry { .. }
            | OrbitError::Name { .. }
            | OrbitError::NoValue => libc::EINVAL,
            OrbitError::Cancelled { .. } => libc::ECANCELED,
            OrbitError::Skipped { .. } => libc::EALREADY,
            OrbitError::QueueFull { .. } => libc::EAGAIN,
            OrbitError::TimedOut { .. } => libc::ETIMEDOUT,
            OrbitError::Inside { .. } | OrbitError::Outside { .. } => libc::EPERM,
            OrbitError::OtherProcess { .. } => libc::ECHILD,
            OrbitError::BadUpdate { .. } => libc::EBADMSG,
            OrbitError::Send { .. } => libc::ENOBUFS,
            _ => libc::EIO,
        }
    }
}

impl ToErrno for DomainError {
    fn errno(&self) -> c_int {
        match self {
            DomainError::System(error) => error.errno.raw_os_error(),
            DomainError::Setup { errno, .. } => errno.raw_os_error(),
            DomainError::Full { .. } => libc::EAGAIN,
            DomainError::TooLong { .. } | DomainError::Setting { .. } => libc::EINVAL,
            DomainError::SpareGone { .. } | DomainError::DiedEarly { .. } => libc::ESRCH,
            _ => libc::EIO,
        }
    }
}

impl ToErrno for AreaError {
    fn errno(&self) -> c_int {
        match self {
            AreaError::Floor(MemoryError::System(error) | MemoryError::Tracker { cause: error, .. }) => {
                error.errno.raw_os_error()
            }
            AreaError::Floor(MemoryError::TrackerName) => libc::EINVAL,
            AreaError::System(error) => error.errno.raw_os_error(),
            AreaError::InOrbit { .. } => libc::EPERM,
            AreaError::Foreign => libc::ECHILD,
            AreaError::Size { .. } | AreaError::Address { .. } | AreaError::Use { .. } => libc::EINVAL,
            AreaError::Busy { .. } => libc::EBUSY,
            AreaError::Store { errno, .. } | AreaError::Memory { errno, .. } => errno.raw_os_error(),
            _ => libc::ENOMEM,
        }
    }
}

impl ToErrno for ObjectError {
    fn errno(&self) -> c_int {
        match self {
            ObjectError::Connect { .. } | ObjectError::Owner { .. } => libc::ENOTCONN,
            ObjectError::Refused { refusal, .. } => match refusal {
                Refusal::NotFound | Refusal::NotHeld => libc::ENOENT,
                Refusal::Denied => libc::EACCES,
                Refusal::Quota => libc::EDQUOT,
                Refusal::Size => libc::EFBIG,
                Refusal::Mismatch | Refusal::Changed => libc::EBADMSG,
                Refusal::Descriptor | Refusal::FileSystem => libc::EBADF,
                Refusal::Malformed => libc::EINVAL,
                Refusal::Busy => libc::EBUSY,
                Refusal::Exhausted => libc::ENOMEM,
            },
            ObjectError::NotSealed { .. } | ObjectError::WrongBytes { .. } => libc::EBADMSG,
            ObjectError::NotExecutable { .. } => libc::EACCES,
            ObjectError::Range { .. } => libc::EINVAL,
            ObjectError::System { errno, .. } => errno.raw_os_error(),
            _ => libc::EPROTO,
        }
    }
}

impl ToErrno for InstanceError {
    fn errno(&self) -> c_int {
        match self {
            InstanceError::Open { cause, .. } => cause.raw_os_error().unwrap_or(libc::EIO),
            InstanceError::Elf { .. }
            | InstanceError::NotBuilt { .. }
            | InstanceError::Version { .. }
            | InstanceError::Mixed { .. }
            | InstanceError::TextRelocations { .. }
            | InstanceError::ExecutableStack { .. }
            | InstanceError::InitialExec { .. }
            | InstanceError::Relocation { .. }
            | InstanceError::Import { .. }
            | InstanceError::Load { .. } => libc::ENOEXEC,
            InstanceError::Loaded { .. } => libc::EALREADY,
            InstanceError::Symbol { .. } => libc::ENOENT,
            InstanceError::AddressSpace { .. } => libc::ENOMEM,
            InstanceError::System { errno, .. } => errno.raw_os_error(),
            InstanceError::Entered { .. }
            | InstanceError::Threads { .. }
            | InstanceError::Attached
            | InstanceError::BaseTaken { .. }
            | InstanceError::BaseUsed { .. } => libc::EBUSY,
            InstanceError::NotInnermost { .. } => libc::EPERM,
            InstanceError::Foreign => libc::EINVAL,
            _ => libc::EIO,
        }
    }
}

impl ToErrno for VaultError {
    fn errno(&self) -> c_int {
        match self {
            VaultError::Gone => libc::EOWNERDEAD,
            VaultError::TimedOut => libc::ETIMEDOUT,
            VaultError::NotAlone { .. } => libc::EAGAIN,
            VaultError::NoVault => libc::ENOTSOCK,
            VaultError::Start { errno, .. } | VaultError::Errno(errno) => errno.raw_os_error(),
            _ => libc::EIO,
        }
    }
}
