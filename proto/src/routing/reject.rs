//! What a refusal means for a dispatch (DISP-4, DISP-6). Called by [`super::Dispatch`].

use crate::wire::reason::Reason;

/// What to do after a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// Pressure: counted against the worker, a probe is used up, next worker (DISP-4).
    Pressure,
    /// Another request of the session runs there: wait and ask again, never elsewhere (ADM-8).
    Busy,
    /// Ask the same worker again, with the append prefilled elsewhere (DISP-6).
    LargeAppend,
    /// It would not fit into that worker at all; on every worker: the client's answer (ADM-6).
    TooLarge,
    /// The worker takes nothing new (ADM-12).
    Draining,
    /// The worker knows a later placement: take one above it and ask again, once (SES-4).
    Outdated,
    /// The worker has handed the session over: go where it says (MIG-1).
    Moved,
    /// The worker is another process than meant: ask that one again, once (F16).
    Restarted,
    /// It says nothing about pressure: next worker, nothing counted.
    Elsewhere,
}

/// Reads a refusal. Only [`Meaning::Pressure`] uses up a probe: the others say nothing about room (DISP-6).
pub fn meaning(reason: Reason) -> Meaning {
    match reason {
        Reason::SessionBusy => Meaning::Busy,
        Reason::RealLargeAppend => Meaning::LargeAppend,
        Reason::TooLarge => Meaning::TooLarge,
        Reason::Draining => Meaning::Draining,
        Reason::StaleEpoch | Reason::NotOwner => Meaning::Outdated,
        Reason::Moved => Meaning::Moved,
        Reason::StaleIncarnation => Meaning::Restarted,
        reason if reason.counts_as_reject() => Meaning::Pressure,
        _ => Meaning::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pressure_is_counted() {
        // DISP-6
        for reason in [
            Reason::RealLargeAppend,
            Reason::SessionBusy,
            Reason::Draining,
            Reason::TooLarge,
            Reason::Moved,
            Reason::NotOwner,
        ] {
            assert_ne!(meaning(reason), Meaning::Pressure, "{reason}");
        }
        for reason in [Reason::NoDCapacity, Reason::SessionNotResidentNoCapacity] {
            assert_eq!(meaning(reason), Meaning::Pressure, "{reason}");
        }
    }
}
