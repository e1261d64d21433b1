//! The session store that a world's routers share (SES-4): placement numbers are given out once each.

use std::sync::{Arc, Mutex, PoisonError};

use kvc_proto::{
    id::{Placement, SessionId},
    routing::{MemoryStore, SessionStore},
};

/// Placement numbers that several routers share.
#[derive(Clone, Debug)]
pub struct Store(pub Arc<Mutex<MemoryStore>>);

impl SessionStore for Store {
    fn take(&mut self, session: &SessionId, above: Option<Placement>) -> Placement {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take(session, above)
    }
}
