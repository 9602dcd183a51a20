//! HTTP in front of a warm server: each request runs as a script of `orrery warm serve`, by the Common Gateway Interface
//! (RFC 3875), so that balancers such as nginx and HAProxy can spread requests over several hosts.
//!
//! The program `orrery-warm-http` serves; `orrery warm http` executes it. This library is what both have: the command line
//! ([`command`]) and the health report ([`report`]); and what is decided without a connection: which script a path means ([`paths`]),
//! what a script is told of its request ([`variables`]), and how its answer begins ([`answer`]).

pub mod answer;
pub mod command;
pub mod paths;
pub mod report;
pub mod variables;
