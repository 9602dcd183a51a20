//! What a manager knows: its table, its tracees, its handlers, and what it counts.

use std::collections::HashMap;
use std::os::fd::OwnedFd;

use super::journal::Journals;
use super::loading::Loaded;
use super::privilege::{Budget, Privilege};
use super::settings::{Handler, Settings};
use crate::attributes::{AttributeError, Capability, Rights, Subscription, Table, TraceeId};
use crate::cpu::{Admit, CpuService, Masks, OwnCpus, Placement};
use crate::net::NetService;
use crate::protocol::{SCHEMA, Status};

/// How long a manager that ends when it is idle waits for its first tracee, in nanoseconds.
const FIRST: u64 = 30_000_000_000;

/// A tracee's process.
#[derive(Debug)]
pub(super) struct Process {
    pub(super) pidfd: OwnedFd,
    pub(super) pid: i32,
    pub(super) uid: u32,
}

/// A handler, and what it waits for.
pub(super) struct Registered {
    pub(super) handler: Box<dyn Handler>,
    pub(super) heard: Subscription,
}

/// A manager's state.
pub(super) struct State {
    pub(super) table: Table,
    pub(super) cpu: CpuService,
    pub(super) net: NetService,
    pub(super) processes: HashMap<TraceeId, Process>,
    pub(super) handlers: Vec<Registered>,
    pub(super) privilege: Privilege,
    pub(super) budget: Budget,
    pub(super) counts: Counts,
    pub(super) connections: usize,
    pub(super) owner: u32,
    pub(super) journals: Journals,
    /// The extensions that connections have loaded, since the first one.
    pub(super) loaded: Option<Loaded>,
    pub(super) user_extensions: usize,
    /// The CPUs that the manager was given, for threads that it makes.
    pub(super) cpus: OwnCpus,
    started: u64,
    /// What the handlers' subscriptions stand on.
    own: Capability,
}

/// What a manager counts.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) ticks: u64,
    pub(super) tick_time: u64,
    pub(super) refused: u64,
    pub(super) joined: u64,
    pub(super) dropped_calls: u64,
}

impl State {
    pub(super) fn new(
        settings: &Settings,
        handlers: Vec<Box<dyn Handler>>,
        privilege: Privilege,
        journals: Journals,
        cpus: OwnCpus,
    ) -> Result<Self, AttributeError> {
        let mut table = Table::new(settings.classes.clone());
        let masks = Masks::default();
        table.add_guard(Box::new(Admit::new(table.classes(), masks.clone(), cpus.mask())?));
        let placement =
            (privilege.realtime && std::env::var_os("NOPLACE").is_none()).then(|| Placement::new(cpus));
        let cpu = CpuService::new(&table, masks, &settings.mechanisms, placement)?;
        let net = NetService::new(&table)?;
        let all = table.grant(Rights::ALL)?;
        let handlers = handlers
            .into_iter()
            .map(|handler| {
                let heard = table.subscribe(&all, &handler.topics(), 1024)?;
                Ok(Registered { handler, heard })
            })
            .collect::<Result<_, AttributeError>>()?;
        Ok(Self {
            table,
            cpu,
            net,
            processes: HashMap::new(),
            handlers,
            privilege,
            budget: Budget::new(settings.budget),
            counts: Counts::default(),
            connections: 0,
            owner: rustix::process::geteuid().as_raw(),
            journals,
            loaded: None,
            user_extensions: settings.user_extensions,
            cpus,
            started: crate::time::now(),
            own: all,
        })
    }

    pub(super) fn status(&mut self) -> Status {
        Status {
            schema: SCHEMA,
            pid: std::process::id().cast_signed(),
            uptime: crate::time::now().saturating_sub(self.started),
            realtime: self.privilege.realtime,
            locked: self.privilege.locked,
            ticks: self.counts.ticks,
            tick_time: self.counts.tick_time,
            cpu_time: orrery_sys::scheduling::thread_cpu_time(),
            budget: self.budget.most(),
            over_budget: self.budget.exceeded(),
            connections: self.connections,
            refused: self.counts.refused,
            dropped_calls: self.counts.dropped_calls,
            classes: self.table.classes().all().iter().map(|class| class.name.clone()).collect(),
            tracees: self.cpu.report(),
            packets: self.net.report(),
        }
    }

    /// Returns whether the last tracee has ended; or none came within the time that one may take to come.
    pub(super) fn is_idle(&self) -> bool {
        let expected = self.counts.joined == 0 && crate::time::now().saturating_sub(self.started) < FIRST;
        self.processes.is_empty() && !expected
    }

    /// Returns the extensions that connections have loaded.
    pub(super) fn loaded(&mut self) -> Result<&mut Loaded, String> {
        if self.loaded.is_none() {
            self.loaded = Some(Loaded::new(&mut self.table, &self.own, &self.processes)?);
        }
        self.loaded.as_mut().ok_or_else(|| "cannot load an extension".to_owned())
    }

    /// Returns whether this user may do everything with extensions.
    pub(super) fn is_privileged(&self, uid: u32) -> bool {
        uid == 0 || uid == self.owner
    }

    /// Removes a tracee that has ended, or could not join.
    pub(super) fn remove(&mut self, tracee: TraceeId) {
        self.net.leave(tracee);
        self.cpu.leave(tracee);
        self.table.remove_tracee(tracee);
        self.processes.remove(&tracee);
        self.journals.stop(tracee);
    }
}
