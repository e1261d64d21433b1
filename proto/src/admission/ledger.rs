//! The ledger of ADM-7: every sum is kept up to date by the change that moves it, so a decision reads four numbers.
//!
//! `used` = base − reclaimable + Σ over live charges of max(0, reserved − allocated). *base* is K_d − free − the
//! engine's own evictable tokens at the last poll; what this worker frees or lands between two polls moves it at once.
//! *reclaimable* are own pages of idle unleased sessions, as far as base contains them.

/// See the module. In tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ledger {
    capacity: u64,
    limit: u64,
    base: u64,
    reclaimable: u64,
    outstanding: u64,
}

/// What one grant or turn has promised and got, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Promised, page-rounded.
    pub reserved: u32,
    /// Of it, landed by an import and resident.
    pub landed: u32,
    /// Of it, allocated by the running turn at the last poll.
    pub running: u32,
}

impl Charge {
    /// What it may still take from the pool.
    pub fn outstanding(self) -> u64 {
        u64::from(self.reserved).saturating_sub(u64::from(self.landed) + u64::from(self.running))
    }
}

impl Ledger {
    /// An empty ledger over K_d tokens, of which ρ (in thousandths) may be promised.
    pub fn new(capacity: u32, rho_permille: u32) -> Ledger {
        let capacity = u64::from(capacity);
        let limit = capacity * u64::from(rho_permille.min(1000)) / 1000;
        Ledger {
            capacity,
            limit,
            base: 0,
            reclaimable: 0,
            outstanding: 0,
        }
    }

    /// ρ·K_d.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// K_d.
    pub fn capacity(&self) -> u64 {
        self.capacity
    }

    /// The ledger's used tokens.
    pub fn used(&self) -> u64 {
        self.base.saturating_sub(self.reclaimable) + self.outstanding
    }

    /// Used, if `unreclaimed` tokens stopped being reclaimable and `need` more were promised.
    pub fn used_with(&self, unreclaimed: u32, need: u64) -> u64 {
        self.base
            .saturating_sub(self.reclaimable.saturating_sub(u64::from(unreclaimed)))
            + self.outstanding
            + need
    }

    /// A new snapshot.
    pub fn snapshot(&mut self, free: u32, tree_evictable: u32) {
        self.base = self
            .capacity
            .saturating_sub(u64::from(free) + u64::from(tree_evictable));
    }

    /// Pages that base contains have been given back.
    pub fn freed(&mut self, tokens: u32) {
        self.base = self.base.saturating_sub(u64::from(tokens));
    }

    /// Pages have been allocated for an import.
    pub fn landed(&mut self, tokens: u32) {
        self.base += u64::from(tokens);
    }

    /// A session's reclaimable tokens change.
    pub fn reclaim(&mut self, before: u32, after: u32) {
        self.reclaimable = self.reclaimable + u64::from(after) - u64::from(before);
    }

    /// A charge begins.
    pub fn open(&mut self, charge: Charge) {
        self.outstanding += charge.outstanding();
    }

    /// A charge changes.
    pub fn change(&mut self, charge: &mut Charge, new: Charge) {
        self.outstanding = self.outstanding + new.outstanding() - charge.outstanding();
        *charge = new;
    }

    /// A charge ends.
    pub fn close(&mut self, charge: Charge) {
        self.outstanding -= charge.outstanding();
    }

    /// The sums, for checks: base, reclaimable, outstanding.
    pub fn sums(&self) -> (u64, u64, u64) {
        (self.base, self.reclaimable, self.outstanding)
    }
}
