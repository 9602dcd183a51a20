//! The server's life: it accepts connections, drains, stops, and ends when what it served has ended.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use orrery_sys::service_manager;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::connection::Connection;
use crate::service;
use crate::settings::Settings;
use crate::state::{Phase, State};
use crate::watch::Watch;

/// Pause after a connection could not be accepted, for want of descriptors, say.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves until SIGTERM or SIGINT; then drains, and waits for what runs.
///
/// # Errors
/// A message for the user.
pub(crate) async fn serve(settings: Settings, listeners: Vec<std::net::TcpListener>) -> Result<()> {
    let mut stop = Stop::new()?;
    let (drain, finish) = (settings.drain, settings.finish);
    let (phase, phases) = watch::channel(Phase::Serving);
    let (alive, mut all_gone) = mpsc::channel(1);
    let watch = Arc::new(Watch::new(settings.client.clone(), settings.reply_time));
    let requests = Arc::new(Semaphore::new(settings.requests));
    tokio::spawn(Arc::clone(&watch).run(Arc::clone(&requests), settings.requests));
    let state = Arc::new(State {
        requests,
        connections: Arc::new(Semaphore::new(settings.connections)),
        settings: Arc::new(settings),
        watch,
        counts: Arc::default(),
        phase: phases,
        _alive: alive,
    });
    let mut acceptors = JoinSet::new();
    for listener in listeners {
        listener.set_nonblocking(true).context("cannot set a listening socket to O_NONBLOCK")?;
        let listener = TcpListener::from_std(listener).context("cannot wait for a listening socket")?;
        let address = listener.local_addr().context("cannot get the address of a listening socket")?;
        tracing::info!("listening on http://{address}");
        acceptors.spawn(accept(listener, Arc::clone(&state)));
    }
    drop(state);
    service_manager::ready();

    stop.next().await;
    tracing::info!("serving for {drain:?} more, while balancers find other servers");
    service_manager::stopping();
    service_manager::status("Draining");
    phase.send_replace(Phase::Draining);
    stop.next_within(drain).await;
    tracing::info!("stopping: requests have {finish:?} to end");
    service_manager::status("Waiting for requests to end");
    phase.send_replace(Phase::Stopping);
    while let Some(ended) = acceptors.join_next().await {
        ended.context("a thread that accepts connections has failed")?;
    }
    tokio::select! {
        _ = all_gone.recv() => {}
        () = stop.next_within(finish) => tracing::warn!("requests have not ended in time: their scripts are ended"),
    }
    Ok(())
}

/// The signals that ask for an end.
struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    fn new() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot wait for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits so long, or until a further signal.
    async fn next_within(&mut self, time: Duration) {
        // Either is the end of it.
        let _ = tokio::time::timeout(time, self.next()).await;
    }
}

async fn accept(listener: TcpListener, state: Arc<State>) {
    loop {
        let permit = tokio::select! {
            biased;
            () = state.stopping() => break,
            permit = Arc::clone(&state.connections).acquire_owned() => permit,
        };
        let accepted = tokio::select! {
            biased;
            () = state.stopping() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                let state = Arc::clone(&state);
                tokio::spawn(async move {
                    let _permit = permit;
                    converse(stream, peer, state).await;
                });
            }
            Err(error) => {
                tracing::warn!("cannot accept a connection: {error}; it is tried again");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    // Who has connected already would be told by a reset that the request is lost.
    let Ok(listener) = listener.into_std() else { return };
    while let Ok((stream, peer)) = listener.accept() {
        if stream.set_nonblocking(true).is_ok()
            && let Ok(stream) = TcpStream::from_std(stream)
        {
            tokio::spawn(converse(stream, peer, Arc::clone(&state)));
        }
    }
}

/// Serves one connection to its end.
async fn converse(stream: TcpStream, peer: SocketAddr, state: Arc<State>) {
    state.counts.connected();
    serve_connection(stream, peer, &state).await;
    state.counts.disconnected();
}

async fn serve_connection(stream: TcpStream, peer: SocketAddr, state: &Arc<State>) {
    let prepared = prepare(&stream, peer, state);
    let connection = match prepared {
        Ok(connection) => Arc::new(connection),
        Err(error) => return tracing::debug!("cannot prepare the connection of {peer}: {error}"),
    };
    let answer = service_fn(|request| {
        let (state, connection) = (Arc::clone(state), Arc::clone(&connection));
        async move { Ok::<_, Infallible>(service::answer(&state, &connection, request).await) }
    });
    let ended = {
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(state.settings.head_time)
            .max_buf_size(state.settings.head)
            .serve_connection(TokioIo::new(stream), answer);
        tokio::pin!(served);
        tokio::select! {
            biased;
            ended = served.as_mut() => ended,
            () = state.stopping() => {
                served.as_mut().graceful_shutdown();
                served.await
            }
        }
    };
    let is_refused = match ended {
        Ok(()) => connection.has_refused(),
        Err(error) => {
            tracing::debug!("the connection of {peer} failed: {error}");
            // The library has answered with status 400 or 431.
            connection.has_refused() || error.is_parse()
        }
    };
    if is_refused && let Err(error) = connection.linger().await {
        tracing::debug!("cannot discard what {peer} still sends: {error}");
    }
}

fn prepare(stream: &TcpStream, peer: SocketAddr, state: &State) -> std::io::Result<Connection> {
    stream.set_nodelay(true)?;
    let time = u32::try_from(state.settings.send_time.as_millis()).unwrap_or(u32::MAX);
    rustix::net::sockopt::set_tcp_user_timeout(stream, time)?;
    Ok(Connection::new(stream.local_addr()?, peer, stream.as_fd().try_clone_to_owned()?))
}
