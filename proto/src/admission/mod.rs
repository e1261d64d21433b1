//! May a turn run here? (algorithms §3)
//!
//! `ledger` the tokens in use and promised, `decide` the rules ADM-1..6 as one pure function, `reservation` the grants
//! and their idempotence. [`Worker`](crate::worker::Worker) feeds them; no decision looks at more than one session.

pub mod decide;
pub mod ledger;
pub mod reservation;
#[cfg(test)]
mod tests;

pub use decide::{Question, Verdict, decide};
pub use ledger::{Charge, Ledger};
pub use reservation::{Reservation, Reservations};
