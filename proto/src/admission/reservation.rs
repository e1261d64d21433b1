//! Grants: each is one live charge. Asking twice gives the same grant; what was released or is over stays so
//! (ADM-10). All memory here is bounded: live grants by the ledger, the rest by constants.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::{
    id::{RequestKey, ReservationId, RouterId, TurnId},
    session::Key,
    time::Now,
    wire::admit::Mode,
};

use super::Charge;

/// Requests remembered as over. A forgotten one costs at most a reservation that lapses by itself.
pub const TOMBSTONES: usize = 8192;
/// Routers whose highest request number is remembered.
pub const ROUTERS: usize = 64;

/// One grant, or one turn that was admitted on arrival.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// The session it holds.
    pub session: Key,
    /// Who asked; nobody for a turn admitted on arrival.
    pub key: Option<RequestKey>,
    /// How the turn will run.
    pub mode: Mode,
    /// Of the charge: growth, in tokens.
    pub growth: u32,
    /// What it costs.
    pub charge: Charge,
    /// When it lapses; a turn that has arrived does not.
    pub deadline: Option<Now>,
    /// The turn that took it over.
    pub turn: Option<TurnId>,
}

/// All live grants.
#[derive(Clone, Debug)]
pub struct Reservations {
    live: HashMap<ReservationId, Reservation>,
    by_key: HashMap<RequestKey, ReservationId>,
    over: HashSet<RequestKey>,
    over_order: VecDeque<RequestKey>,
    highest: VecDeque<(RouterId, u64)>,
    next: u64,
}

impl Reservations {
    /// None yet. Numbers start at `first`: those of an earlier process at this address must mean nothing (F16).
    pub fn new(first: u64) -> Reservations {
        Reservations {
            live: HashMap::new(),
            by_key: HashMap::new(),
            over: HashSet::new(),
            over_order: VecDeque::new(),
            highest: VecDeque::new(),
            next: first,
        }
    }

    /// Remembers a grant.
    pub fn insert(&mut self, reservation: Reservation) -> ReservationId {
        let id = ReservationId(self.next);
        self.next += 1;
        if let Some(key) = reservation.key {
            self.by_key.insert(key, id);
        }
        self.live.insert(id, reservation);
        id
    }

    /// The live grant of a request.
    pub fn of_request(&self, key: &RequestKey) -> Option<ReservationId> {
        self.by_key.get(key).copied()
    }

    /// A live grant.
    pub fn get(&self, id: ReservationId) -> Option<&Reservation> {
        self.live.get(&id)
    }

    /// A live grant.
    pub fn get_mut(&mut self, id: ReservationId) -> Option<&mut Reservation> {
        self.live.get_mut(&id)
    }

    /// Ends a grant; its request stays over.
    pub fn remove(&mut self, id: ReservationId) -> Option<Reservation> {
        let reservation = self.live.remove(&id)?;
        if let Some(key) = reservation.key {
            self.by_key.remove(&key);
            self.bury(key);
        }
        Some(reservation)
    }

    /// Leaves a tombstone: an admit with this key that arrives later is refused.
    pub fn bury(&mut self, key: RequestKey) {
        if self.over.insert(key) {
            self.over_order.push_back(key);
            if self.over_order.len() > TOMBSTONES
                && let Some(oldest) = self.over_order.pop_front()
            {
                self.over.remove(&oldest);
            }
        }
    }

    /// Whether a request is over.
    pub fn is_over(&self, key: &RequestKey) -> bool {
        self.over.contains(key)
    }

    /// A request of this router has been seen (EAR-7).
    pub fn seen(&mut self, router: RouterId, request: u64) {
        let known = self
            .highest
            .iter()
            .position(|(r, _)| *r == router)
            .and_then(|at| self.highest.remove(at));
        self.highest
            .push_back((router, known.map_or(request, |(_, h)| h.max(request))));
        if self.highest.len() > ROUTERS {
            self.highest.pop_front();
        }
    }

    /// The highest request number seen from a router.
    pub fn highest(&self, router: RouterId) -> u64 {
        self.highest.iter().find(|(r, _)| *r == router).map_or(0, |(_, h)| *h)
    }

    /// Live grants.
    pub fn iter(&self) -> impl Iterator<Item = (ReservationId, &Reservation)> {
        self.live.iter().map(|(id, r)| (*id, r))
    }

    /// Live grants.
    pub fn len(&self) -> usize {
        self.live.len()
    }

    /// No live grant.
    pub fn is_empty(&self) -> bool {
        self.live.is_empty()
    }
}
