//! The sockets to listen on: an address, or what a service manager passed.

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd as _, OwnedFd};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketType, sockopt};

/// Where to listen unless told otherwise: where only programs of this machine can connect.
const DEFAULT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 8000);

/// Returns the sockets that the service manager passed, or one on the address.
///
/// # Errors
/// A message for the user.
pub(crate) fn listeners(address: Option<SocketAddr>) -> Result<Vec<TcpListener>> {
    let passed = orrery_sys::service_manager::passed_descriptors().context(
        "cannot take the sockets that LISTEN_PID and LISTEN_FDS announce; unset these to do without",
    )?;
    match (passed.is_empty(), address) {
        (true, address) => {
            let address = address.unwrap_or(DEFAULT);
            Ok(vec![TcpListener::bind(address).with_context(|| format!("cannot listen on {address}"))?])
        }
        (false, Some(address)) => bail!(
            "cannot listen on {address}: the service manager passed a socket to listen on; leave --listen out, or start the \
             server without its socket unit"
        ),
        (false, None) => passed.into_iter().map(check).collect(),
    }
}

fn check(socket: OwnedFd) -> Result<TcpListener> {
    let is_of_internet = sockopt::socket_domain(socket.as_fd())
        .is_ok_and(|family| family == AddressFamily::INET || family == AddressFamily::INET6);
    let is_stream = sockopt::socket_type(socket.as_fd()).is_ok_and(|kind| kind == SocketType::STREAM);
    let listens = sockopt::socket_acceptconn(socket.as_fd()).unwrap_or(false);
    ensure!(
        is_of_internet && is_stream && listens,
        "cannot listen on what the service manager passed: it is no listening TCP socket; have ListenStream= name a port"
    );
    Ok(TcpListener::from(socket))
}
