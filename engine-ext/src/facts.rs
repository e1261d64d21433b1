//! What the engine tells about itself, once, at start.

use kvc_cuda::KvLayout;

/// The engine as the adapter sees it.
#[derive(Clone, Debug)]
pub struct EngineFacts {
    /// Where KV lies.
    pub layout: KvLayout,
    /// The model as the engine names it; peers must serve the same (XFER-6).
    pub model: String,
    /// Engine name and version, `sglang 0.5.10.post1`.
    pub engine: String,
    /// K_d: tokens the engine's allocator hands out.
    pub capacity: u32,
}
