//! What a script is told of its request: the variables of RFC 3875, section 4.1.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStringExt as _;

use hyper::header::{self, HeaderMap, HeaderName};
use hyper::{Method, Uri, Version};

use crate::paths::Found;

/// Variables of the server's own environment that scripts get: where programs are, the language, the time zone, and the home
/// directory, which decides about Python's packages.
pub const INHERITED: [&str; 6] = ["PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ"];

/// A request whose body has arrived.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target.
    pub uri: &'a Uri,
    /// The version of HTTP.
    pub version: Version,
    /// The fields.
    pub headers: &'a HeaderMap,
    /// The size of the body.
    pub length: u64,
    /// The script.
    pub found: &'a Found,
    /// The address that the client is connected to.
    pub local: SocketAddr,
    /// The client's address, or that of the balancer before it.
    pub peer: SocketAddr,
    /// Whether the script gets `Authorization`.
    pub authorization: bool,
}

/// Returns the variables that describe a request.
#[must_use]
pub fn describe(request: &Request<'_>) -> Vec<(OsString, OsString)> {
    let text = |value: &str| value.as_bytes().to_vec();
    let host = request.headers.get(header::HOST).and_then(|host| host.to_str().ok()).and_then(host_name);
    let local = request.local.ip().to_canonical().to_string();
    let mut variables: Vec<(String, Vec<u8>)> = [
        ("GATEWAY_INTERFACE", text("CGI/1.1")),
        ("SERVER_SOFTWARE", text(concat!("orrery/", env!("CARGO_PKG_VERSION")))),
        ("SERVER_PROTOCOL", text(if request.version == Version::HTTP_10 { "HTTP/1.0" } else { "HTTP/1.1" })),
        ("SERVER_NAME", text(host.as_deref().unwrap_or(&local))),
        ("SERVER_PORT", request.local.port().to_string().into_bytes()),
        ("REMOTE_ADDR", request.peer.ip().to_canonical().to_string().into_bytes()),
        ("REMOTE_PORT", request.peer.port().to_string().into_bytes()),
        ("REQUEST_METHOD", text(request.method.as_str())),
        ("REQUEST_URI", text(request.uri.path_and_query().map_or("", |target| target.as_str()))),
        ("QUERY_STRING", text(request.uri.query().unwrap_or_default())),
        ("SCRIPT_NAME", request.found.name.clone()),
        ("SCRIPT_FILENAME", request.found.path.clone().into_os_string().into_vec()),
        ("PATH_INFO", request.found.info.clone()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if request.length > 0 || request.headers.contains_key(header::CONTENT_LENGTH) {
        variables.push(("CONTENT_LENGTH".to_owned(), request.length.to_string().into_bytes()));
    }
    if let Some(kind) = request.headers.get(header::CONTENT_TYPE) {
        variables.push(("CONTENT_TYPE".to_owned(), kind.as_bytes().to_vec()));
    }
    for name in request.headers.keys() {
        if let Some(variable) = variable_name(name, request.authorization) {
            let separator: &[u8] = if name == header::COOKIE { b"; " } else { b", " };
            let values: Vec<&[u8]> =
                request.headers.get_all(name).iter().map(|value| value.as_bytes()).collect();
            variables.push((variable, values.join(separator)));
        }
    }
    variables.into_iter().map(|(name, value)| (name.into(), OsString::from_vec(value))).collect()
}

/// The name without the port, if it is one that may stand in a host.
fn host_name(host: &str) -> Option<String> {
    let uri: hyper::http::uri::Authority = host.parse().ok()?;
    Some(uri.host().to_owned()).filter(|host| !host.is_empty())
}

/// Returns the variable for a field of a request; `None` for those that scripts do not get.
fn variable_name(name: &HeaderName, authorization: bool) -> Option<String> {
    let is_kept = match *name {
        // Variables of their own.
        header::CONTENT_LENGTH | header::CONTENT_TYPE => false,
        // About the connection, which is not the script's.
        header::CONNECTION
        | header::TE
        | header::TRAILER
        | header::TRANSFER_ENCODING
        | header::UPGRADE
        | header::EXPECT => false,
        header::PROXY_AUTHORIZATION => false,
        // RFC 3875, section 4.1.18.
        header::AUTHORIZATION => authorization,
        // HTTP_PROXY is where libraries look for a proxy (httpoxy, CVE-2016-5385 and others).
        _ => !matches!(name.as_str(), "proxy" | "keep-alive" | "proxy-connection"),
    };
    // A_B and A-B would be the same variable, so that one could be sent in the place of the other, past a balancer's checks.
    let is_plain = name.as_str().bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    (is_kept && is_plain).then(|| format!("HTTP_{}", name.as_str().to_ascii_uppercase().replace('-', "_")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::File;

    use super::*;

    fn described(
        target: &str,
        fields: &[(&str, &str)],
        length: u64,
        authorization: bool,
    ) -> BTreeMap<String, String> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(HeaderName::try_from(*name).unwrap(), value.parse().unwrap());
        }
        let open = || File::open("/").unwrap().into();
        let found = Found {
            script: open(),
            directory: open(),
            path: "/srv/x.py".into(),
            name: b"/x.py".into(),
            info: b"/y z".into(),
        };
        let request = Request {
            method: &Method::POST,
            uri: &target.parse().unwrap(),
            version: Version::HTTP_11,
            headers: &headers,
            length,
            found: &found,
            local: "[::ffff:10.0.0.1]:80".parse().unwrap(),
            peer: "10.0.0.2:4000".parse().unwrap(),
            authorization,
        };
        let string = |text: OsString| text.into_string().unwrap();
        describe(&request).into_iter().map(|(name, value)| (string(name), string(value))).collect()
    }

    #[test]
    fn a_request_is_described_by_the_variables_of_the_specification() {
        let fields = [
            ("Host", "example.org:8080"),
            ("Content-Type", "text/plain"),
            ("Content-Length", "3"),
            ("X-Two", "a"),
            ("x-two", "b"),
            ("Cookie", "a=1"),
            ("Cookie", "b=2"),
            ("User-Agent", "test"),
        ];
        let expected = [
            ("CONTENT_LENGTH", "3"),
            ("CONTENT_TYPE", "text/plain"),
            ("GATEWAY_INTERFACE", "CGI/1.1"),
            ("HTTP_COOKIE", "a=1; b=2"),
            ("HTTP_HOST", "example.org:8080"),
            ("HTTP_USER_AGENT", "test"),
            ("HTTP_X_TWO", "a, b"),
            ("PATH_INFO", "/y z"),
            ("QUERY_STRING", "q=%20&r"),
            ("REMOTE_ADDR", "10.0.0.2"),
            ("REMOTE_PORT", "4000"),
            ("REQUEST_METHOD", "POST"),
            ("REQUEST_URI", "/x.py/y%20z?q=%20&r"),
            ("SCRIPT_FILENAME", "/srv/x.py"),
            ("SCRIPT_NAME", "/x.py"),
            ("SERVER_NAME", "example.org"),
            ("SERVER_PORT", "80"),
            ("SERVER_PROTOCOL", "HTTP/1.1"),
            ("SERVER_SOFTWARE", concat!("orrery/", env!("CARGO_PKG_VERSION"))),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(described("/x.py/y%20z?q=%20&r", &fields, 3, false), BTreeMap::from(expected));
    }

    #[test]
    fn fields_that_could_deceive_a_script_are_left_out() {
        let fields = [
            ("Proxy", "http://evil"),
            ("X_Forwarded_For", "1.2.3.4"),
            ("X.Y", "z"),
            ("Authorization", "Basic secret"),
            ("Proxy-Authorization", "Basic secret"),
            ("Transfer-Encoding", "chunked"),
            ("Connection", "close"),
        ];
        let names = |authorization| {
            let described = described("/x.py", &fields, 0, authorization);
            described
                .into_keys()
                .filter(|name| name.starts_with("HTTP_") || name.starts_with("CONTENT"))
                .collect::<Vec<_>>()
        };
        assert_eq!(names(false), Vec::<String>::new());
        assert_eq!(names(true), ["HTTP_AUTHORIZATION"]);
        // Without a name that is one, the address stands for it.
        assert_eq!(described("/x.py", &[("Host", "a b")], 0, false)["SERVER_NAME"], "10.0.0.1");
    }
}
