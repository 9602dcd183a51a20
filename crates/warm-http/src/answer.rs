//! How the answer of a script begins: the header that RFC 3875 has before the body (section 6).
//!
//! The lines are read by `httparse`; what they mean for CGI is decided here. A script is not trusted to speak HTTP: what frames
//! messages on the connection is the server's, and fields that would change it are not passed on.

/// Most fields of a header.
const MOST_FIELDS: usize = 128;

/// Fields that are about one connection (RFC 9110, section 7.6.1), which is not the script's.
const HOP_BY_HOP: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "http2-settings",
];

/// The header of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The status code, of three digits from 200.
    pub status: u16,
    /// The fields to pass on, in their order: what HTTP allows as name and value.
    pub fields: Vec<(String, Vec<u8>)>,
    /// The size of the body, if the script says it.
    pub length: Option<u64>,
}

/// What is wrong with a header.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// It is not made of lines `Name: value`.
    #[error("a line of the header is not `Name: value` ({0})")]
    Malformed(httparse::Error),
    /// It begins as an HTTP answer does.
    #[error(
        "the answer begins with a status line of HTTP: NPH scripts are not supported; write `Status: 200 OK`"
    )]
    StatusLine,
    /// `Status` is no status.
    #[error("Status: {0:?} is not a number from 200 to 599, perhaps with a reason after a space")]
    Status(String),
    /// `Content-Length` is no length, or there are two.
    #[error("Content-Length is not one number")]
    Length,
    /// A field stands twice that may stand once.
    #[error("{0} stands twice")]
    Twice(&'static str),
    /// There is none of the fields of CGI.
    #[error("there is none of Content-Type, Location and Status")]
    Nothing,
}

/// Reads the header that `bytes` begin with, and returns it with its length; `None` if it does not end in them.
///
/// # Errors
/// See [`Error`].
pub fn parse(bytes: &[u8]) -> Result<Option<(Head, usize)>, Error> {
    if bytes.starts_with(b"HTTP/") {
        return Err(Error::StatusLine);
    }
    let mut lines = [httparse::EMPTY_HEADER; MOST_FIELDS];
    match httparse::parse_headers(bytes, &mut lines) {
        Ok(httparse::Status::Complete((length, lines))) => Ok(Some((Head::of(lines)?, length))),
        Ok(httparse::Status::Partial) => Ok(None),
        Err(error) => Err(Error::Malformed(error)),
    }
}

impl Head {
    fn of(lines: &[httparse::Header<'_>]) -> Result<Self, Error> {
        let (mut status, mut length, mut located, mut typed) = (None, None, false, false);
        let mut fields = Vec::with_capacity(lines.len());
        for line in lines {
            let name = line.name.to_ascii_lowercase();
            match name.as_str() {
                "status" => {
                    once(&mut status, parse_status(line.value)?, "Status")?;
                    continue;
                }
                "content-length" => once(&mut length, parse_length(line.value)?, "Content-Length")?,
                "location" if located => return Err(Error::Twice("Location")),
                "location" => located = true,
                "content-type" if typed => return Err(Error::Twice("Content-Type")),
                "content-type" => typed = true,
                name if HOP_BY_HOP.contains(&name) => continue,
                _ => {}
            }
            fields.push((name, line.value.to_owned()));
        }
        if status.is_none() && !located && !typed {
            return Err(Error::Nothing);
        }
        let status = status.unwrap_or(if located { 302 } else { 200 });
        Ok(Self { status, fields, length })
    }

    /// Returns whether an answer of this status has no body (RFC 9110, section 6.4.1).
    #[must_use]
    pub fn is_without_body(&self) -> bool {
        matches!(self.status, 204 | 304)
    }
}

fn once<T>(place: &mut Option<T>, value: T, name: &'static str) -> Result<(), Error> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(Error::Twice(name)),
    }
}

/// `200`, `404 Not Found`. The reason is not passed on: that of the HTTP library stands for the number.
fn parse_status(value: &[u8]) -> Result<u16, Error> {
    let refused = || Error::Status(String::from_utf8_lossy(value).into_owned());
    let number = value.split(|byte| *byte == b' ').next().unwrap_or_default();
    let number = std::str::from_utf8(number).ok().filter(|text| text.len() == 3).ok_or_else(refused)?;
    let number: u16 = number.parse().map_err(|_| refused())?;
    // Interim answers would be followed by another one.
    if (200..600).contains(&number) { Ok(number) } else { Err(refused()) }
}

fn parse_length(value: &[u8]) -> Result<u64, Error> {
    let digits = std::str::from_utf8(value).map_err(|_| Error::Length)?;
    // parse() takes a sign, too.
    if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        digits.parse().map_err(|_| Error::Length)
    } else {
        Err(Error::Length)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn head(text: &str) -> Result<Option<(u16, Vec<String>)>, Error> {
        let parsed = parse(text.as_bytes())?;
        Ok(parsed.map(|(head, _)| {
            let fields = head.fields.iter();
            (
                head.status,
                fields.map(|(name, value)| format!("{name}={}", String::from_utf8_lossy(value))).collect(),
            )
        }))
    }

    #[test]
    fn the_headers_of_the_specification_are_read() {
        let fields = |fields: &[&str]| fields.iter().map(|&field| field.to_owned()).collect::<Vec<_>>();
        for (text, status, expected) in [
            ("Content-Type: text/plain\n\nbody", 200, &["content-type=text/plain"][..]),
            ("content-type:text/plain\r\nX-A:  b c \r\n\r\n", 200, &["content-type=text/plain", "x-a=b c"]),
            ("Status: 404 Not Found\n\n", 404, &[]),
            ("Status: 599\nX-A: \n\n", 599, &["x-a="]),
            ("Location: https://host/x\n\n", 302, &["location=https://host/x"]),
            ("Location: /x?y\n\n", 302, &["location=/x?y"]),
            ("Status: 301 Gone there\nLocation: /x\n\n", 301, &["location=/x"]),
            ("Content-Type: a/b\nContent-Length: 3\n\nabc", 200, &["content-type=a/b", "content-length=3"]),
            (
                "Content-Type: a/b\nTransfer-Encoding: chunked\nConnection: close\nUpgrade: h2c\n\n",
                200,
                &["content-type=a/b"],
            ),
            (
                "Content-Type: a/b\nSet-Cookie: a=1\nSet-Cookie: b=2\n\n",
                200,
                &["content-type=a/b", "set-cookie=a=1", "set-cookie=b=2"],
            ),
        ] {
            assert_eq!(head(text), Ok(Some((status, fields(expected)))), "{text:?}");
        }
        let (_, length) = parse(b"Content-Type: a/b\n\nbody").unwrap().unwrap();
        assert_eq!(length, 19);
    }

    #[test]
    fn what_is_no_header_is_refused() {
        for text in [
            "no header\n\n",
            "Content-Type: a/b\nno header\n\n",
            ": nameless\n\n",
            "Content Type: a/b\n\n",
            "Content-Type : a/b\n\n",
            "Content-Type: a\rb\n\n",
            "Content-Type: a\0b\n\n",
            "Content-Type: a/b\n folded\n\n",
            "Traceback (most recent call last):\n\n",
        ] {
            assert!(matches!(head(text), Err(Error::Malformed(_))), "{text:?}: {:?}", head(text));
        }
        assert_eq!(head("HTTP/1.1 200 OK\n\n"), Err(Error::StatusLine));
        for status in ["100", "101 Switching", "600", "20", "2000", "abc", "", "-20", "+20"] {
            assert!(matches!(head(&format!("Status: {status}\n\n")), Err(Error::Status(_))), "{status:?}");
        }
        for length in ["x", "-1", "+1", "1, 1", "99999999999999999999"] {
            assert_eq!(
                head(&format!("Content-Type: a/b\nContent-Length: {length}\n\n")),
                Err(Error::Length),
                "{length:?}"
            );
        }
        assert_eq!(head("Status: 200\nStatus: 200\n\n"), Err(Error::Twice("Status")));
        assert_eq!(head("Location: /a\nLocation: /b\n\n"), Err(Error::Twice("Location")));
        assert_eq!(head("Content-Type: a/b\nContent-Type: a/b\n\n"), Err(Error::Twice("Content-Type")));
        assert_eq!(
            head("Content-Type: a/b\nContent-Length: 1\nContent-Length: 1\n\n"),
            Err(Error::Twice("Content-Length"))
        );
        assert_eq!(head("\n\nbody"), Err(Error::Nothing));
        assert_eq!(head("X-A: b\n\n"), Err(Error::Nothing));
        assert!(head(&"X-A: b\n".repeat(MOST_FIELDS + 1)).is_err());
        for part in
            ["", "Content-Type", "Content-Type: a/b", "Content-Type: a/b\n", "Content-Type: a/b\r\n\r"]
        {
            assert_eq!(head(part), Ok(None), "{part:?}");
        }
    }

    proptest! {
        /// What a header says comes out as it went in, whatever follows it and however many bytes of it have arrived.
        #[test]
        fn fields_come_out_as_they_went_in(
            status in 200_u16..600,
            fields in proptest::collection::vec(("x-[a-z]{1,8}", "[!-~]([ -~]{0,20}[!-~])?"), 0..20),
            crlf in any::<bool>(),
            body in proptest::collection::vec(any::<u8>(), 0..50),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut text = format!("Status: {status} Reason{end}");
            for (name, value) in &fields {
                text.push_str(&format!("{name}: {value}{end}"));
            }
            text.push_str(end);
            let whole = [text.as_bytes(), &body].concat();
            let (head, length) = parse(&whole).unwrap().unwrap();
            prop_assert_eq!((head.status, length), (status, text.len()));
            let expected: Vec<_> = fields.iter().map(|(name, value)| (name.clone(), value.clone().into_bytes())).collect();
            prop_assert_eq!(head.fields, expected);
            for end in 0..text.len() {
                prop_assert_eq!(parse(&text.as_bytes()[..end]), Ok(None));
            }
        }

        /// No bytes make a head that HTTP could not carry.
        #[test]
        fn no_bytes_break_a_message(bytes in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b':'), any::<u8>()], 0..200)) {
            let bytes = [b"Status: 200\n".as_slice(), &bytes].concat();
            if let Ok(Some((head, length))) = parse(&bytes) {
                prop_assert!(length <= bytes.len());
                for (name, value) in head.fields {
                    prop_assert!(!name.is_empty() && !name.contains(['\r', '\n', ' ', ':']));
                    prop_assert!(!value.iter().any(|byte| matches!(byte, b'\r' | b'\n' | 0)));
                    prop_assert!(!HOP_BY_HOP.contains(&name.as_str()));
                }
            }
        }
    }
}
