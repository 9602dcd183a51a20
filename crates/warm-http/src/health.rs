//! The answer to those who ask whether to send requests here.

use std::time::Duration;

use hyper::{Response, StatusCode, header};
use orrery_warm_http::report::{PATIENCE, Report, Warm};

use crate::body::{self, Body};
use crate::state::State;
use crate::watch::Reply;

/// Returns how long the query of a question has the warm server waited for: `wait=TIME`, which is [`PATIENCE`] at most.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn patience(query: Option<&str>) -> Result<Duration, String> {
    let mut values = query.unwrap_or_default().split('&').filter_map(|word| word.strip_prefix("wait="));
    values.next_back().map_or(Ok(PATIENCE), |text| Ok(orrery_policy::values::duration(text)?.min(PATIENCE)))
}

/// Answers with 200 if a script that came now would be run, else with 503; and what is known as JSON. The warm server has `patience`
/// to reply.
pub(crate) async fn answer(state: &State, patience: Duration) -> Response<Body> {
    let reply = state.watch.ask(patience).await;
    let (warm, health) = match reply {
        Reply::Health(health) => (Warm::Replies, Some(health)),
        Reply::Silent => (Warm::Silent, None),
        Reply::Absent => (Warm::Absent, None),
    };
    let workers = health.as_ref().map_or(&[][..], |health| &health.workers);
    let ready = workers.iter().filter(|worker| worker.ready).count();
    let (status, word) = match (state.is_draining(), warm, ready) {
        (true, ..) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (false, Warm::Silent, _) => (StatusCode::SERVICE_UNAVAILABLE, "the warm server does not reply"),
        (false, _, 0) => (StatusCode::SERVICE_UNAVAILABLE, "no worker is ready"),
        (false, ..) => (StatusCode::OK, "ok"),
    };
    let (received, refused, failed) = state.counts.values();
    let report = Report {
        status: word.to_owned(),
        warm,
        workers: workers.len(),
        ready,
        busy: workers.iter().filter(|worker| worker.ready && worker.busy).count(),
        served: health.as_ref().map(|health| health.served),
        connections: state.counts.connections(),
        // Those that run, and those that wait for a worker.
        requests: state.settings.requests - state.requests.available_permits(),
        received,
        refused,
        failed,
    };
    // It has no maps whose keys are not strings, and nothing else that could fail.
    let text = serde_json::to_string(&report).unwrap_or_default();
    let mut response = Response::new(body::of(format!("{text}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_query_bounds_the_wait() {
        assert_eq!(patience(None), Ok(PATIENCE));
        assert_eq!(patience(Some("a=b&wait=500ms&c")), Ok(Duration::from_millis(500)));
        assert_eq!(patience(Some("wait=1h")), Ok(PATIENCE));
        assert!(patience(Some("wait=soon")).unwrap_err().contains("soon"));
    }
}
