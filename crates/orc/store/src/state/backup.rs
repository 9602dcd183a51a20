//! Starts a new supervisor when the old one has died, and gives it everything.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use crate::state::clients::Listener;
use crate::state::fdstore::encode;
use crate::state::store_state::{State, record};
use crate::supervisor::records::{AccountRecord, Key, encode_path};

impl State {
    /// Starts a new supervisor if there is none any more, and stores all records there; returns whether there is a new one.
    ///
    /// # Errors
    /// If no process can be started; the store goes on without.
    pub(crate) fn replace_supervisor(&mut self, listeners: &[Listener]) -> io::Result<bool> {
        if self.fdstore.link().is_some() {
            return Ok(false);
        }
        let config = serde_json::to_vec(&*self.config)?;
        self.fdstore.start_supervisor()?;
        self.fdstore.put(&Key::Config, &config, None);
        for (number, listener) in (0..).zip(listeners) {
            self.fdstore.put(
                &Key::Listener(number),
                &encode(&listener.domain),
                Some(listener.socket.as_fd()),
            );
        }
        for (number, lock) in (0..).zip(&self.locks) {
            self.fdstore.put(&Key::Lock(number), &[], Some(lock.as_fd()));
        }
        for (domain, account, share) in self.objects.accounts().iter() {
            let record = AccountRecord { account: account.clone(), share };
            self.fdstore.put(&Key::Account(domain.clone()), &encode(&record), None);
        }
        for (domain, objects) in self.objects.trust_domains() {
            for (id, entry) in objects.iter() {
                let file = &entry.object.file;
                let path = encode_path(file.path.as_deref());
                self.fdstore.put(&Key::BackingFile(file.number), &path, Some(file.fd.as_fd()));
                self.fdstore.put(&Key::Object(domain.clone(), *id), &encode(&record(entry)), None);
            }
        }
        for (number, connection) in self.clients.iter() {
            let key = Key::Connection(number);
            let connection = Arc::clone(connection);
            self.fdstore.put(&key, &encode(&connection.peer), Some(connection.socket.as_fd()));
            for (domain, id, count) in self.objects.holds_of(number) {
                self.fdstore.put(&Key::Hold(number, domain, id), &encode(&count), None);
            }
        }
        for (domain, table) in self.catalog.placement_tables() {
            self.fdstore.put(&Key::PlacementTable(domain.clone()), &[], Some(table));
        }
        self.fdstore.end();
        Ok(self.fdstore.link().is_some())
    }
}
