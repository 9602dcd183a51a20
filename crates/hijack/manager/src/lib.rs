//! Service managers: attributes of tracees, guards, events, and who gets the CPU when.
//!
//! After the service managers of SafeX in "Hijack: Taking Control of COTS Systems to Enforce Predictable Service Guarantees" (West and
//! Parmer): encapsulated policies that run beside the programs they serve, at once when something happens, and that programs
//! influence by attributes only. The program `orrery-manager` serves; `orrery manager` starts it and asks it.
//!
//! # The table, for code that runs in the manager
//!
//! A [`Table`] has the values of all [classes](Classes) of all tracees. Code that has the table may do everything; code that may not
//! (an extension) is handed a [`Capability`] by [`Table::grant`], and the manager passes it along with what that code asks:
//!
//! ```
//! use orrery_manager::{Classes, Rights, Scope, Table, Topic};
//!
//! let mut table = Table::new(Classes::own()?);
//! let tracee = table.add_tracee()?;
//! // May do to this tracee what its user may.
//! let rights = Rights::of_user(table.classes(), 1000, 0, Some(tracee));
//! let capability = table.grant(rights)?;
//!
//! let heard = table.subscribe(&capability, &[Topic::Attribute], 64)?;
//! table.set(&capability, tracee, &[("cpu.target", 40_000_000), ("cpu.period", 400_000_000)])?;
//! assert_eq!(table.get(&capability, tracee, "cpu.target")?, 40_000_000);
//! assert_eq!(table.next_event(&heard).map(|event| event.value), Some(40_000_000));
//! table.emit(&capability, Some(tracee), 7, 1)?;
//!
//! table.revoke(&capability);
//! assert!(table.get(&capability, tracee, "cpu.target").is_err());
//! # Ok::<(), orrery_manager::AttributeError>(())
//! ```
//!
//! Values are numbers of 64 bits; [`Kind`] says of what (nanoseconds, millionths). A set is checked in this order, and changes nothing
//! if anything refuses: capability, class, right, range, sum over all tracees, guards ([`Table::add_guard`]). A service finds what
//! was set by [`Table::take_changes`], and writes what it measures by [`Table::record`].

mod attributes;
pub mod bars;
pub mod client;
pub mod command;
mod cpu;
pub mod experiment;
mod extensions;
pub mod join;
mod net;
mod private_manager;
pub mod protocol;
mod server;
pub mod time;

pub use attributes::{
    Admission, AttributeError, Capability, Change, Class, ClassSet, Classes, Event, Guard, Kind, NotMade,
    Permission, Proposal, Rights, Scope, Subscription, Table, Topic, TraceeId, Upcalls,
};
pub use cpu::{CpuReport, Mechanism, Reservation};
pub use extensions::{ExtensionError, ExtensionHandler, Package, load};
pub use net::PacketReport;
pub use private_manager::PrivateManager;
pub use server::{Handler, ServeError, Settings, serve};
