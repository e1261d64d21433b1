//! Reliable queue pairs: made, connected, started, failed, destroyed. The exporter answers READs through them, the
//! importer posts READs to them (`work`).

use std::{
    mem,
    net::Ipv6Addr,
    ptr::{self, NonNull},
    sync::Arc,
};

use super::{
    choose::Choice,
    device::{Completions, Domain},
    error::VerbsError,
    library::ffi::{self, ibv_qp_attr_mask as Mask, ibv_qp_state as State},
};

/// What both ends do alike, from the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tuning {
    /// Waits 4.096 µs × 2^timeout for an answer, `retries` times more.
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) traffic_class: u8,
    pub(super) service_level: u8,
}

/// The other end of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Path {
    pub(super) gid: Ipv6Addr,
    pub(super) lid: u16,
    pub(super) number: u32,
    /// The first packet number that it sends.
    pub(super) psn: u32,
    /// Of both ports, the smaller.
    pub(super) mtu: u32,
    /// READs in progress at once, what both ends can.
    pub(super) reads: u8,
}

/// A reliable connected queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    raw: NonNull<ffi::ibv_qp>,
    domain: Arc<Domain>,
    _completions: Arc<Completions>,
}

// SAFETY: obligation 1 — libibverbs may be called from any thread; destroyed in `drop` alone.
unsafe impl Send for QueuePair {}
// SAFETY: obligation 1 — as above; posting locks inside the provider.
unsafe impl Sync for QueuePair {}

impl QueuePair {
    /// One that knows no peer yet. `requests` fit its send queue; `answers` says whether the peer may READ through it.
    pub(super) fn new(
        domain: &Arc<Domain>,
        completions: &Arc<Completions>,
        choice: &Choice,
        (requests, pieces): (u32, u32),
        answers: bool,
    ) -> Result<Self, VerbsError> {
        let device = &domain.device;
        let mut init = ffi::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: completions.raw(),
            recv_cq: completions.raw(),
            srq: ptr::null_mut(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: requests.min(device.limits.requests).max(1),
                max_recv_wr: 1,
                max_send_sge: pieces.min(device.limits.pieces).max(1),
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: obligation 1 — no work names memory yet; domain and queue are alive and held.
        let raw = unsafe { (device.library().ibv_create_qp)(domain.raw(), &mut init) };
        let raw = device.made("ibv_create_qp", raw)?;
        let pair = QueuePair {
            raw,
            domain: domain.clone(),
            _completions: completions.clone(),
        };
        let mut attr = blank();
        attr.qp_state = State::IBV_QPS_INIT;
        attr.port_num = choice.port;
        attr.qp_access_flags = if answers {
            ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
        } else {
            0
        };
        pair.modify(
            &mut attr,
            Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS,
        )?;
        Ok(pair)
    }

    pub(super) fn number(&self) -> u32 {
        // SAFETY: obligation 1 — the queue pair is alive.
        unsafe { self.raw.as_ref() }.qp_num
    }

    pub(super) fn raw(&self) -> *mut ffi::ibv_qp {
        self.raw.as_ptr()
    }

    /// From here on it answers the peer's READs.
    pub(super) fn connect(&self, choice: &Choice, path: &Path, tuning: &Tuning) -> Result<(), VerbsError> {
        let mut attr = blank();
        attr.qp_state = State::IBV_QPS_RTR;
        attr.path_mtu = path.mtu;
        attr.dest_qp_num = path.number;
        attr.rq_psn = path.psn;
        attr.max_dest_rd_atomic = path.reads;
        attr.min_rnr_timer = 12;
        attr.ah_attr.dlid = path.lid;
        attr.ah_attr.sl = tuning.service_level;
        attr.ah_attr.port_num = choice.port;
        // Within one InfiniBand subnet the header is not needed and does no harm; RoCE goes by it.
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid.raw = path.gid.octets();
        attr.ah_attr.grh.sgid_index = choice.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.traffic_class = tuning.traffic_class;
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask)
    }

    /// From here on it sends READs, the first with packet number `psn`.
    pub(super) fn start(&self, psn: u32, path: &Path, tuning: &Tuning) -> Result<(), VerbsError> {
        let mut attr = blank();
        attr.qp_state = State::IBV_QPS_RTS;
        attr.sq_psn = psn;
        attr.timeout = tuning.timeout;
        attr.retry_cnt = tuning.retries;
        attr.rnr_retry = tuning.retries;
        attr.max_rd_atomic = path.reads;
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask)
    }

    /// Ends it: whatever was posted completes, flushed or not, and no peer reads through it any more.
    pub(super) fn fail(&self) {
        let mut attr = blank();
        attr.qp_state = State::IBV_QPS_ERR;
        if let Err(error) = self.modify(&mut attr, Mask::IBV_QP_STATE) {
            // A device that is gone: destroying the pair is what is left, and the owner does so.
            tracing::debug!(%error, "queue pair not moved to error");
        }
    }

    fn modify(&self, attr: &mut ffi::ibv_qp_attr, mask: Mask) -> Result<(), VerbsError> {
        let device = &self.domain.device;
        // SAFETY: obligation 1 — the queue pair is alive; obligation 3 — which lease it belongs to is its owner's record.
        let code = unsafe { (device.library().ibv_modify_qp)(self.raw(), attr, mask.0 as i32) };
        device.check("ibv_modify_qp", code)
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let device = &self.domain.device;
        // SAFETY: obligation 1 — destroyed once; when the call returns the device touches no memory for it any more.
        let code = unsafe { (device.library().ibv_destroy_qp)(self.raw()) };
        if code != 0 {
            tracing::error!(device = device.name, errno = code, "queue pair was not destroyed");
        }
    }
}

fn blank() -> ffi::ibv_qp_attr {
    // SAFETY: obligation 1 — no memory is named: a struct of numbers may be zero.
    unsafe { mem::zeroed() }
}
