//! Whether an address is someone's: asked as RFC 5227 has it, by an ARP request from nobody.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, RawProtocol, RecvFlags, SocketType, recv, socket};

/// How often is asked, and how long an answer may take each time. On a bridge of this host it takes microseconds.
const TRIES: u32 = 3;
const PATIENCE: Duration = Duration::from_millis(150);
/// `ETH_P_ARP` of `linux/if_ether.h`, and ARP's two messages (RFC 826).
const ETH_P_ARP: u16 = 0x0806;
const REQUEST: u16 = 1;
const REPLY: u16 = 2;
/// Ethernet carries IPv4: kinds of addresses and their lengths.
const KINDS: [u8; 6] = [0, 1, 8, 0, 6, 4];
const EVERYONE: [u8; 6] = [0xff; 6];

/// The message that asks who has an address, from a card whose own address is not known yet.
fn question(card: [u8; 6], address: Ipv4Addr) -> Vec<u8> {
    let mut message = KINDS.to_vec();
    message.extend(REQUEST.to_be_bytes());
    message.extend(card);
    message.extend([0; 4 + 6]);
    message.extend(address.octets());
    message
}

/// Whose card a message says to have an address, if that is what it says.
fn answer(message: &[u8], address: Ipv4Addr) -> Option<[u8; 6]> {
    let (kinds, rest) = message.split_at_checked(6)?;
    let (operation, rest) = rest.split_at_checked(2)?;
    let (card, rest) = rest.split_first_chunk::<6>()?;
    let is_theirs = kinds == KINDS && rest.starts_with(&address.octets());
    (is_theirs && operation == REPLY.to_be_bytes()).then_some(*card)
}

/// The card that has an address in the network of one of this host's devices, if any has.
///
/// # Errors
///
/// Where nobody can be asked: without the right to (`CAP_NET_RAW`), or if the device is off.
pub(crate) fn who_has(device: &str, address: Ipv4Addr) -> io::Result<Option<String>> {
    let name = std::ffi::CString::new(device)?;
    // SAFETY: the name ends with a zero.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let index = i32::try_from(index).ok().filter(|&index| index > 0).ok_or_else(io::Error::last_os_error)?;
    let protocol = RawProtocol::new(u32::from(ETH_P_ARP.to_be())).map(rustix::net::Protocol::from_raw);
    let socket = socket(AddressFamily::PACKET, SocketType::DGRAM, protocol)?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(PATIENCE / 3),
    )?;
    // SAFETY: the structure is integers and bytes, for which nothing is a value.
    let mut own: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    own.sll_family = u16::try_from(libc::AF_PACKET).unwrap_or_default();
    own.sll_protocol = ETH_P_ARP.to_be();
    own.sll_ifindex = index;
    let mut length = libc::socklen_t::try_from(size_of_val(&own)).unwrap_or_default();
    // SAFETY: both structures are as long as is said, and the second call may write to its own.
    let bound = unsafe {
        let bound = libc::bind(socket.as_raw_fd(), (&raw const own).cast(), length);
        bound | libc::getsockname(socket.as_raw_fd(), (&raw mut own).cast(), &raw mut length)
    };
    if bound != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut card = [0; 6];
    card.copy_from_slice(&own.sll_addr[..6]);
    let question = question(card, address);
    own.sll_halen = 6;
    own.sll_addr[..6].copy_from_slice(&EVERYONE);
    for _ in 0..TRIES {
        let length = libc::socklen_t::try_from(size_of_val(&own)).unwrap_or_default();
        // SAFETY: message and address are as long as is said.
        let sent = unsafe {
            let to = (&raw const own).cast();
            libc::sendto(socket.as_raw_fd(), question.as_ptr().cast(), question.len(), 0, to, length)
        };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            let mut message = [0; 64];
            let Ok((_, length)) = recv(&socket, &mut message[..], RecvFlags::empty()) else { continue };
            if let Some(card) = answer(&message[..length.min(64)], address) {
                let words: Vec<String> = card.iter().map(|byte| format!("{byte:02x}")).collect();
                return Ok(Some(words.join(":")));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 7);

    #[test]
    fn a_question_is_no_answer_and_an_answer_is_about_one_address() {
        let mut message = question([1; 6], ADDRESS);
        assert_eq!(message.len(), 28);
        assert_eq!(answer(&message, ADDRESS), None);
        message[7] = 2;
        message[14..18].copy_from_slice(&ADDRESS.octets());
        assert_eq!(answer(&message, ADDRESS), Some([1; 6]));
        assert_eq!(answer(&message, Ipv4Addr::new(10, 0, 0, 8)), None);
        for length in 0..18 {
            assert_eq!(answer(&message[..length], ADDRESS), None);
        }
    }

    #[test]
    fn a_device_that_is_not_there_is_an_error() {
        assert!(who_has("no-such-device", ADDRESS).is_err());
    }
}
