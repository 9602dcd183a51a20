//! From a policy's text to compiled rules and services.

use orrery_policy::{Document, Fault, Section};

use super::compile::compile;
use super::services::poll_time;
use super::{Mount, Policy, PolicyError, Services};

/// Reads and checks.
pub(crate) fn parse(text: &str, name: &str) -> Result<Policy, PolicyError> {
    let document = Document::parse(text, name)?;
    document.refuse(
        &Section::SANDBOX,
        "an executive cannot hold lists of what is allowed against hostile code; orrery guard does",
    )?;
    let lines = document.rules().iter().map(|rule| document.line(rule.span().start)).collect();
    let rules = compile(document.rules()).map_err(|fault| document.error(fault))?;
    let services = services(&document).map_err(|fault| document.error(fault))?;
    let manager = document.manager().map(|section| section.get_ref().clone());
    Ok(Policy { rules, lines, services, manager, ..Policy::default() })
}

fn services(document: &Document) -> Result<Services, Fault> {
    let text = document.services();
    let mut services = Services { sleep: text.sleep, remember: text.remember, ..Services::default() };
    if let Some(time) = &text.poll_receive {
        let fault = |message| Fault { span: time.span(), message };
        services.poll_receive = Some(poll_time(time.get_ref()).map_err(fault)?);
    }
    for text in document.mounts() {
        let prefix = &text.get_ref().prefix;
        let fault = |message| Fault { span: prefix.span(), message };
        services.mounts.push(Mount::new(prefix.get_ref(), text.get_ref().archive.clone()).map_err(fault)?);
        if let Some((inner, outer)) = services.nested() {
            let (inner, outer) = (inner.prefix().display(), outer.prefix().display());
            return Err(fault(format!(
                "{inner} is within {outer}, which is mounted, too: mount one archive"
            )));
        }
    }
    Ok(services)
}
