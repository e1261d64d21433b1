//! Worlds for the tests of routing and policy: three decode workers that are up, and answers of real shape.

use super::{
    session::Record,
    view::{At, View, WorkerIndex},
};
use crate::{
    id::{Incarnation, ReservationId},
    wire::{
        admit::{AdmitAnswer, LoadReport, Mode},
        info::{Role, WorkerInfo},
        reason::Reason,
    },
};

pub const D0: WorkerIndex = WorkerIndex(0);
pub const D1: WorkerIndex = WorkerIndex(1);
pub const D2: WorkerIndex = WorkerIndex(2);

pub fn info(incarnation: u64) -> WorkerInfo {
    WorkerInfo {
        incarnation: Incarnation(incarnation),
        role: Role::Both,
        version: "0".into(),
        engine: "e".into(),
        model: "m".into(),
        listen: "127.0.0.1:1".into(),
        peer: "127.0.0.1:2".into(),
        page_tokens: 1,
        capacity: 1_000_000,
        max_uncached_tokens: 8192,
        layout: "l".into(),
        movers: vec!["tcp".into()],
        draining: false,
        load: LoadReport::default(),
    }
}

pub fn view(roles: &[Role]) -> View {
    let mut view = View::new(roles.iter().copied());
    for w in view.all().collect::<Vec<_>>() {
        view.seen(w, &info(u64::from(w.0) + 1));
    }
    view
}

pub fn admits(worker: WorkerIndex, mode: Mode, resident: u32) -> AdmitAnswer {
    AdmitAnswer {
        can_admit: true,
        mode: Some(mode),
        reason: None,
        reservation: Some(ReservationId(9)),
        deadline_ms: Some(30_000),
        resident_tokens: resident,
        epoch: None,
        moved: None,
        incarnation: Incarnation(u64::from(worker.0) + 1),
        load: LoadReport::default(),
    }
}

pub fn refuses(worker: WorkerIndex, reason: Reason, resident: u32) -> AdmitAnswer {
    AdmitAnswer {
        can_admit: false,
        mode: None,
        reason: Some(reason),
        reservation: None,
        deadline_ms: None,
        ..admits(worker, Mode::Direct, resident)
    }
}

/// Three decode workers and one session's record.
pub struct View3 {
    pub view: View,
    pub record: Record,
}

impl View3 {
    pub fn new() -> View3 {
        View3 {
            view: view(&[Role::Decode; 3]),
            record: Record::default(),
        }
    }
    pub fn at(&self, d: WorkerIndex) -> At {
        self.view.at(d)
    }
    pub fn hold(&mut self, d: WorkerIndex, tokens: u32) {
        self.record.holds(self.at(d), tokens);
    }
    pub fn pin(&mut self, d: WorkerIndex) {
        self.record.pin = Some(self.at(d));
    }
    pub fn reject(&mut self, d: WorkerIndex, times: u32) {
        (0..times).for_each(|_| self.record.reject(self.view.at(d)));
    }
    /// Requests that stay there; the world ends before they do.
    pub fn load(&mut self, d: WorkerIndex, requests: u32) {
        for _ in 0..requests {
            let _stays = self.view.enter(d);
        }
    }
    pub fn restart(&mut self, d: WorkerIndex) {
        self.view.seen(d, &info(1000 + u64::from(d.0)));
    }
}
