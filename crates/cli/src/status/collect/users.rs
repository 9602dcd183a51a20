//! The names of users, of `/etc/passwd` alone: a directory service may take long to answer, or never do.

use std::fs;

/// Returns the name of a user; the number if there is none.
pub(super) fn name(user: u32) -> String {
    let text = fs::read_to_string("/etc/passwd").unwrap_or_default();
    find(&text, user).unwrap_or_else(|| user.to_string())
}

fn find(text: &str, user: u32) -> Option<String> {
    // passwd(5): name, password, user ID.
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|name| !name.is_empty())?;
        (fields.nth(1)?.parse() == Ok(user)).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_by_number() {
        let text = "root:x:0:0:root:/root:/bin/sh\nbroken\n:x:7:7::/:\nalice:x:1000:1000::/home/alice:\n";
        assert_eq!(find(text, 0).as_deref(), Some("root"));
        assert_eq!(find(text, 1000).as_deref(), Some("alice"));
        assert_eq!(find(text, 7), None);
        assert_eq!(name(u32::MAX - 5), (u32::MAX - 5).to_string());
    }
}
