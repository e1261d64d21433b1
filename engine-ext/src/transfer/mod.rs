//! The transfer engine: [`Imports`] pull KV from peers into our pages, [`Exports`] let peers read ours, the [`Announcer`]
//! tells backups what there is to pull.

mod announce;
mod export;
pub(crate) mod handover;
pub(crate) mod import;
mod imports;
mod pace;
mod pull;
mod serving;
pub(crate) mod ways;

pub(crate) use announce::Announcer;
pub(crate) use export::{Exports, Granted};
pub(crate) use imports::{Control, Imports};
pub(crate) use pace::Pace;
pub(crate) use serving::Serving;
