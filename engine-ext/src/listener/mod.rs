//! The worker's HTTP surface (engines §5), on a thread of its own: it waits neither for the engine's loop nor for the GIL
//! (ADM-11).

mod answer;
pub(crate) mod body;
mod connection;
mod routes;
mod thread;

pub(crate) use thread::Thread;
