//! The model, encoded as CRIU's image files.

mod files;
mod memory;
mod process;
mod sockets;
mod terminals;

use anyhow::Result;

use crate::image_file::{ImageFile, ImageType};
use crate::messages::{Inventory, KobjIds, Seccomp, SeccompFilter, Timens, Timespec};
use crate::model::{PageSource, ProcessState, RestoreState, Service};

pub(crate) use files::ghost_image;

/// The ID of the service's time namespace, other than that of criu itself.
const TIME_NAMESPACE: u32 = 9;
/// The IDs of the objects of criu itself.
const ROOT_IDS: u32 = 0xfff0;
/// `SECCOMP_FILTER_FLAG_LOG`.
const SECCOMP_LOG: u32 = 2;

/// The images of a service: the contents of all files but those of pages, and where the pages are.
#[derive(Debug)]
pub struct Images {
    pub(crate) files: Vec<ImageFile>,
    /// The numbers of `pages-*.img`, and the ranges of the dead memory that they have.
    pub(crate) pages: Vec<(u32, Vec<(PageSource, u64)>)>,
    pub(crate) restore_state: RestoreState,
}

/// Encodes a service as images.
///
/// # Errors
///
/// A number of the service does not fit into the format.
pub fn encode(service: &Service) -> Result<Images> {
    let mut images =
        Images { files: Vec::new(), pages: Vec::new(), restore_state: service.restore_state.clone() };
    images.files.push(ImageFile::of_all(
        "pstree",
        ImageType::Pstree,
        service.processes.iter().map(process::tree_entry),
    )?);
    for (index, process) in (1..).zip(&service.processes) {
        let pid = process.pid;
        match &process.state {
            ProcessState::Exited { name, status } => {
                let core = process::exited(name, *status);
                images.files.push(ImageFile::of(format!("core-{pid}"), ImageType::Core, &core)?);
            }
            ProcessState::Running(running) => {
                for thread in &running.threads {
                    let core = process::core(running, thread, thread.tid == pid);
                    images.files.push(ImageFile::of(format!("core-{}", thread.tid), ImageType::Core, &core)?);
                }
                images.files.push(ImageFile::of(
                    format!("ids-{pid}"),
                    ImageType::Ids,
                    &ids(index, TIME_NAMESPACE),
                )?);
                images.files.push(memory::address_space(pid, &running.memory)?);
                images.files.push(memory::pagemap(pid, index, &running.memory)?);
                images.pages.push((index, memory::stored_pages(&running.memory)));
                images.files.push(files::directories(pid, &running.directories)?);
                images.files.push(files::descriptors(index, &running.descriptors, &service.files)?);
            }
        }
    }
    for (number, shared) in (memory::FIRST_SHARED_IMAGE..).zip(&service.shared_memory) {
        images.files.push(memory::shared_pagemap(number, shared)?);
        let pages = shared.pages.iter().map(|page| (PageSource::Physical(page.physical), crate::model::PAGE));
        images.pages.push((number, pages.collect()));
    }
    images.files.extend(files::all(service)?);
    images.files.extend(sockets::all(&service.files, service.monotonic)?);
    images.files.extend(terminals::all(&service.files)?);
    images.files.push(filters(service)?);
    let now =
        Timespec { tv_sec: service.monotonic / 1_000_000_000, tv_nsec: service.monotonic % 1_000_000_000 };
    let clock = Timens { monotonic: now, boottime: now };
    images.files.push(ImageFile::of(format!("timens-{TIME_NAMESPACE}"), ImageType::Timens, &clock)?);
    let inventory = Inventory {
        img_version: 2,
        fdinfo_per_id: Some(true),
        root_ids: Some(ids(ROOT_IDS, TIME_NAMESPACE - 1)),
        ns_per_id: Some(true),
        lsmtype: Some(0),
        dump_uptime: Some(service.monotonic / 1000),
    };
    images.files.push(ImageFile::of("inventory", ImageType::Inventory, &inventory)?);
    Ok(images)
}

/// Returns the IDs of a process's shared objects. Its namespaces are those of criu itself; only the clock is its own.
fn ids(id: u32, time_namespace: u32) -> KobjIds {
    KobjIds {
        vm_id: id,
        files_id: id,
        fs_id: id,
        sighand_id: id,
        pid_ns_id: Some(1),
        net_ns_id: Some(2),
        ipc_ns_id: Some(3),
        uts_ns_id: Some(4),
        mnt_ns_id: Some(5),
        user_ns_id: Some(6),
        cgroup_ns_id: Some(7),
        time_ns_id: Some(time_namespace),
    }
}

fn filters(service: &Service) -> Result<ImageFile> {
    let filter = |filter: &crate::model::SeccompFilter| SeccompFilter {
        filter: filter.program.clone(),
        prev: filter.previous,
        flags: filter.logs.then_some(SECCOMP_LOG),
    };
    let all = Seccomp { filters: service.filters.iter().map(filter).collect() };
    let some = (!all.filters.is_empty()).then_some(all);
    ImageFile::of_all("seccomp", ImageType::Seccomp, some)
}
