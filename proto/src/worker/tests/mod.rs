//! Tests of the worker as its callers see it: `engine` a simple real engine around it, `model` random lives with
//! invariants, `field` the field reports, `rules` and `grants` one story per rule, `explore` small state spaces exhaustively.

mod engine;
mod explore;
mod field;
mod following;
mod grants;
mod model;
mod moving;
mod peers;
mod rules;
