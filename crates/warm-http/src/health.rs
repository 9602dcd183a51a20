//! The answer to those who ask whether to send requests here.

use std::time::Duration;

use hyper::{Response, StatusCode, header};
use serde_json::json;

use crate::body::{self, Body};
use crate::state::State;

/// How long the warm server has to answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers with 200 if a script that came now would be run, else with 503; and what is known as JSON.
pub(crate) async fn answer(state: &State) -> Response<Body> {
    let client = state.settings.client.clone();
    let asked = tokio::task::spawn_blocking(move || client.health_within(Some(PATIENCE))).await;
    let draining = state.is_draining();
    let running = state.settings.requests - state.requests.available_permits();
    let (ready, mut report) = match asked {
        Ok(Ok(health)) => {
            let ready = health.workers.iter().filter(|worker| worker.ready).count();
            let busy = health.workers.iter().filter(|worker| worker.ready && worker.busy).count();
            (
                ready > 0,
                json!({ "workers": health.workers.len(), "ready": ready, "busy": busy, "served": health.served }),
            )
        }
        // The reason names paths of this machine: it is for its log.
        Ok(Err(error)) => {
            tracing::debug!("cannot get the state of the warm server: {:#}", anyhow::Error::from(error));
            (false, json!({ "workers": 0, "ready": 0, "busy": 0 }))
        }
        Err(error) => {
            tracing::error!("cannot get the state of the warm server: {error}");
            (false, json!({}))
        }
    };
    let (status, word) = match (draining, ready) {
        (true, _) => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
        (false, true) => (StatusCode::OK, "ok"),
        (false, false) => (StatusCode::SERVICE_UNAVAILABLE, "no worker is ready"),
    };
    report["status"] = word.into();
    // Those that run, and those that wait for a worker.
    report["requests"] = running.into();
    let mut response = Response::new(body::of(format!("{report}\n")));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    headers.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    response
}
