//! Naive workers for [`super::explore`]: who owns what under which number, and nothing else.

use std::collections::BTreeMap;

use crate::{
    id::{Epoch, Incarnation, Placement, StoreId},
    routing::{
        Resident,
        testing::{admits, refuses},
        view::WorkerIndex,
    },
    wire::{
        admit::{AdmitAnswer, Mode, MovedTo, PeerRef, WithdrawAnswer},
        info::Standing,
        reason::Reason,
    },
};

/// The store of the router.
pub(super) const STORE: StoreId = StoreId(1);

pub(super) fn placement(n: u64) -> Placement {
    Placement { n, store: STORE }
}

pub(super) fn index(w: WorkerIndex) -> usize {
    usize::from(w.0)
}

/// A worker.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    pub(super) dead: bool,
    pub(super) copy: bool,
    pub(super) busy: bool,
    pub(super) number: u64,
    pub(super) standing: Standing,
    pub(super) moved: Option<(WorkerIndex, u64)>,
    /// Numbers up to here are withdrawn.
    pub(super) floor: u64,
    /// An import as the target of a move: its number, and whether the owner has granted it.
    pub(super) import: Option<(u64, bool)>,
}

/// All workers, and who has ever owned a number.
#[derive(Clone, Debug)]
pub(super) struct Fleet {
    pub(super) nodes: Vec<Node>,
    owned: BTreeMap<u64, WorkerIndex>,
    /// Two workers have owned one number (MIG-3).
    pub(super) twice: bool,
}

impl Fleet {
    /// The first of three owns the session under number 1.
    pub(super) fn new() -> Fleet {
        let mut nodes = vec![Node::default(); 3];
        nodes.iter_mut().skip(1).for_each(|n| n.standing = Standing::Replica);
        (nodes[0].copy, nodes[0].number) = (true, 1);
        Fleet {
            nodes,
            owned: BTreeMap::from([(1, WorkerIndex(0))]),
            twice: false,
        }
    }

    /// The worker that would hand over under that number now.
    pub(super) fn grants(&mut self, n: u64) -> Option<&mut Node> {
        let would = |o: &&mut Node| !o.dead && !o.busy && o.standing == Standing::Owner && o.copy && o.number < n;
        self.nodes.iter_mut().find(would)
    }

    pub(super) fn own(&mut self, w: WorkerIndex, n: u64) {
        let node = &mut self.nodes[index(w)];
        (node.standing, node.number, node.copy, node.moved) = (Standing::Owner, n, true, None);
        self.twice |= *self.owned.entry(n).or_insert(w) != w;
    }

    /// SES-4: the session was granted elsewhere.
    pub(super) fn placed(&mut self, w: WorkerIndex, n: u64) {
        let node = &mut self.nodes[index(w)];
        if !node.dead && node.number < n {
            (node.standing, node.number, node.busy, node.moved) = (Standing::Replica, n, false, None);
        }
    }

    pub(super) fn owns(&self, w: WorkerIndex, n: u64) -> bool {
        let node = &self.nodes[index(w)];
        node.standing == Standing::Owner && node.number == n
    }

    pub(super) fn residents(&self, workers: &[WorkerIndex]) -> Vec<Resident> {
        let of = |w: &WorkerIndex| {
            let node = &self.nodes[index(*w)];
            (!node.dead).then(|| Resident {
                worker: *w,
                tokens: if node.copy { 90 } else { 0 },
                epoch: (node.number > 0).then(|| Epoch {
                    placement: placement(node.number),
                    rewind: 0,
                }),
                standing: node.standing,
                moved: node.moved.map(|(_, n)| placement(n)),
            })
        };
        workers.iter().filter_map(of).collect()
    }

    /// SES-4, ADM-1, ADM-4, ADM-8.
    pub(super) fn admit(&mut self, w: WorkerIndex, asked: u64) -> AdmitAnswer {
        let node = self.nodes[index(w)].clone();
        let resident = if node.copy { 90 } else { 0 };
        let mut answer = match node.standing {
            Standing::Moved if asked <= node.number => refuses(w, Reason::Moved, resident),
            _ if asked <= node.floor || asked < node.number => refuses(w, Reason::StaleEpoch, resident),
            Standing::Replica if asked == node.number => refuses(w, Reason::StaleEpoch, resident),
            _ if node.busy => refuses(w, Reason::SessionBusy, resident),
            _ if node.import.is_some() => refuses(w, Reason::SessionBusy, resident),
            _ if node.copy => admits(w, Mode::Direct, resident),
            _ => admits(w, Mode::Reseed, 0),
        };
        if answer.can_admit {
            self.own(w, asked);
            self.nodes[index(w)].copy = node.copy;
            self.nodes[index(w)].busy = true;
        }
        answer.moved = node
            .moved
            .filter(|_| answer.reason == Some(Reason::Moved))
            .map(|(to, n)| MovedTo {
                to: PeerRef {
                    peer: "127.0.0.1:2".into(),
                    incarnation: Incarnation(u64::from(to.0) + 1),
                },
                placement: placement(n),
            });
        answer.epoch = (self.nodes[index(w)].number > 0).then(|| Epoch {
            placement: placement(self.nodes[index(w)].number.max(node.floor)),
            rewind: 0,
        });
        answer
    }

    /// MIG-2.
    pub(super) fn withdraw(&mut self, w: WorkerIndex, n: u64) -> WithdrawAnswer {
        if self.owns(w, n) {
            let epoch = Epoch {
                placement: placement(n),
                rewind: 0,
            };
            return WithdrawAnswer::Owner { epoch };
        }
        let node = &mut self.nodes[index(w)];
        node.floor = node.floor.max(n);
        node.import = node.import.filter(|(held, _)| *held > n);
        WithdrawAnswer::Withdrawn
    }
}
