//! MariaDB as it runs in a guest: out of a directory, without anything of this host's configuration, and small.

/// The server and its options; its data are in `/data/db`.
pub const SERVER: [&str; 17] = [
    "mariadbd",
    "--no-defaults",
    "--datadir=/data/db",
    "--user=root",
    "--socket=",
    "--bind-address=0.0.0.0",
    "--skip-grant-tables",
    "--skip-name-resolve",
    "--innodb-use-native-aio=0",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=8M",
    "--tmpdir=/run",
    "--performance-schema=OFF",
    "--lc-messages-dir=/usr/share/mysql",
    "--pid-file=/run/mariadb.pid",
    "--aria-pagecache-buffer-size=8M",
    "--key-buffer-size=8M",
];

/// What the server reads besides, under the same names here and there.
pub const FILES: [&str; 2] = ["/usr/share/mysql/english/errmsg.sys", "/usr/share/mysql/charsets/Index.xml"];

/// Options of `mariadb-install-db`, for data that the server likes; the directory is to be added.
pub const INSTALL: [&str; 6] = [
    "--no-defaults",
    "--user=root",
    "--auth-root-authentication-method=normal",
    "--skip-test-db",
    "--innodb-buffer-pool-size=16M",
    "--innodb-log-file-size=8M",
];
