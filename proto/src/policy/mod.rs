//! The policies of the router (algorithms §2, §6): pure choices over [`crate::routing`]'s state.
//!
//! A policy names the worker that is asked next; what is done with the worker's answer is the dispatch's business.

pub mod kvc;
