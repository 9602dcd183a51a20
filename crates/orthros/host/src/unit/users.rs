//! This host's users and groups, passwd(5) and group(5).

use std::fs;
use std::path::Path;

use orrery_orthros_wire::Credentials;

use crate::error::{Result, file};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Shells of users who have none.
const NO_SHELLS: [&str; 7] =
    ["", "/bin/nologin", "/sbin/nologin", "/usr/sbin/nologin", "/bin/false", "/usr/bin/false", "/bin/true"];

/// A user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct User {
    pub(super) name: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) home: String,
    pub(super) shell: String,
}

/// All that there are.
#[derive(Debug)]
pub(super) struct Users {
    users: Vec<User>,
    /// The name, the number and the members of each group.
    groups: Vec<(String, u32, Vec<String>)>,
}

impl Users {
    pub(super) fn read() -> Result<Self> {
        let read = |path| fs::read_to_string(path).map_err(file("read", Path::new(path)));
        Ok(Self::parse(&read(PASSWD)?, &read(GROUP)?))
    }

    fn parse(passwd: &str, group: &str) -> Self {
        let user = |line: &str| {
            let [name, _, uid, gid, _, home, shell] = line.split(':').collect::<Vec<_>>().try_into().ok()?;
            let [name, home, shell] = [name, home, shell].map(str::to_owned);
            Some(User { name, uid: uid.parse().ok()?, gid: gid.parse().ok()?, home, shell })
        };
        let group_of = |line: &str| {
            let [name, _, gid, members] = line.split(':').collect::<Vec<_>>().try_into().ok()?;
            let members = members.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
            Some((name.to_owned(), gid.parse().ok()?, members))
        };
        Self {
            users: passwd.lines().filter_map(user).collect(),
            groups: group.lines().filter_map(group_of).collect(),
        }
    }

    /// Returns a user, by name or number.
    pub(super) fn user(&self, who: &str) -> Result<&User, String> {
        let number = who.parse().ok();
        let found = self.users.iter().find(|user| user.name == who || Some(user.uid) == number);
        found.ok_or_else(|| {
            format!("{PASSWD} has no user {who}; make one (adduser --system {who}), or name another")
        })
    }

    /// Returns a group's number, by name or number.
    pub(super) fn group(&self, which: &str) -> Result<u32, String> {
        let named = self.groups.iter().find(|(name, ..)| name == which).map(|(_, gid, _)| *gid);
        let gid = named.or_else(|| which.parse().ok());
        gid.ok_or_else(|| {
            format!("{GROUP} has no group {which}; make one (addgroup --system {which}), or name another")
        })
    }

    /// Returns who runs a service of this user and group: the user's own groups come along.
    pub(super) fn identity(&self, user: Option<&User>, group: Option<u32>, more: &[u32]) -> Credentials {
        let gid = group.or(user.map(|user| user.gid)).unwrap_or(0);
        let member = |members: &[String]| user.is_some_and(|user| members.contains(&user.name));
        let mut groups: Vec<u32> =
            self.groups.iter().filter(|(_, _, members)| member(members)).map(|(_, gid, _)| *gid).collect();
        if user.is_some() {
            groups.push(gid);
        }
        groups.extend(more);
        groups.sort_unstable();
        groups.dedup();
        Credentials { uid: user.map_or(0, |user| user.uid), gid, groups }
    }
}

impl User {
    /// Returns what tells a program who it is, systemd.exec(5).
    pub(super) fn environment(&self) -> Vec<(String, String)> {
        let mut variables = vec![("USER", &self.name), ("LOGNAME", &self.name)];
        if !["", "/"].contains(&self.home.as_str()) {
            variables.push(("HOME", &self.home));
        }
        if !NO_SHELLS.contains(&self.shell.as_str()) {
            variables.push(("SHELL", &self.shell));
        }
        variables.into_iter().map(|(name, value)| (name.to_owned(), value.clone())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_found_with_their_groups() {
        let users = Users::parse(
            "root:x:0:0:root:/root:/bin/bash\nredis:x:102:105::/var/lib/redis:/usr/sbin/nologin\nbroken:x\n",
            "root:x:0:\nredis:x:105:\nssl:x:110:www,redis\nwww:x:33:redisx\n",
        );
        let redis = users.user("redis").unwrap();
        assert_eq!(users.user("102"), Ok(redis));
        assert_eq!(
            users.identity(Some(redis), None, &[7]),
            Credentials { uid: 102, gid: 105, groups: vec![7, 105, 110] }
        );
        assert_eq!(
            users.identity(Some(redis), Some(33), &[]),
            Credentials { uid: 102, gid: 33, groups: vec![33, 110] }
        );
        assert_eq!(users.identity(None, Some(33), &[]), Credentials { uid: 0, gid: 33, groups: vec![] });
        let variables: Vec<String> =
            redis.environment().into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(variables, ["USER=redis", "LOGNAME=redis", "HOME=/var/lib/redis"]);
        assert_eq!((users.group("ssl"), users.group("4711")), (Ok(110), Ok(4711)));
        assert!(users.user("broken").unwrap_err().contains("adduser") && users.group("none").is_err());
    }
}
