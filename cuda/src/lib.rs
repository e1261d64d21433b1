//! Where KV lies. The engine's adapter registers its buffers once as a [`KvLayout`]; the transfer engine turns token
//! slots of two workers into the fewest byte runs ([`Plan`]); tests and benches use a pool in host memory ([`HostArena`]).
//! Memory that other processes of the host can map is [`SharedMemory`].
//!
//! Modules that need a CUDA device (gather and scatter kernels, device block tables, stream events, dmabuf export)
//! join here under those names: `gather`, `table`, `stream`, `dmabuf`. Nothing above this crate changes with them.
//!
//! This crate and `rdma` meet only in `engine-ext`.

pub mod host;
pub mod layout;
pub mod plan;
pub mod shared;

pub use host::HostArena;
pub use layout::{Backing, Buffer, Device, Dtype, KvLayout, LayoutError, Shape};
pub use plan::{ByteCopy, Plan, SlotRun};
pub use shared::{SharedMemory, SharedMemoryError};
