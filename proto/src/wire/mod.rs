//! Everything that crosses a process border, and the only place a field name is written (style 9).
//!
//! `admit` and `session`: JSON bodies of a worker's listener (engines §5). `turn`: the header that ties an engine
//! request to its session and reservation. `reason`: every refusal and error code.

pub mod admit;
pub mod info;
pub mod reason;
pub mod turn;
