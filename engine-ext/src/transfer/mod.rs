//! The transfer engine: [`Imports`] pull KV from peers into our pages, [`Exports`] let peers read ours.

mod export;
pub(crate) mod import;
mod imports;
mod pull;

pub(crate) use export::{Exports, Granted};
pub(crate) use imports::Imports;
