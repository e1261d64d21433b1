//! Runs worlds by seed: for the bounded batch, the soak, and the replay of a failing seed with its event log.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::{
    oracle::{Oracle, Violation},
    past::Past,
    plan::{Limits, Plan},
    world::World,
};

/// What came of one or more worlds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// Worlds.
    pub worlds: u64,
    /// Events.
    pub steps: u64,
    /// Answers that clients got.
    pub answers: u64,
    /// Errors that clients got.
    pub errors: u64,
    /// Completed dispatches: direct, seed, reseed, fallback; then requests without a router.
    pub modes: [u64; 5],
    /// Worker crashes, and how many of these came after a drain.
    pub crashes: u64,
    /// See there.
    pub drained: u64,
    /// What the workers did.
    pub past: Past,
}

impl Report {
    /// Adds another.
    pub fn join(&mut self, other: &Report) {
        self.worlds += other.worlds;
        self.steps += other.steps;
        self.answers += other.answers;
        self.errors += other.errors;
        self.crashes += other.crashes;
        self.drained += other.drained;
        self.modes.iter_mut().zip(other.modes).for_each(|(a, b)| *a += b);
        self.past.join(&other.past);
    }
}

/// The world of a seed, from start to end.
///
/// # Errors
/// The first violation. A panic of a machine is one.
pub fn run(seed: u64, limits: &Limits) -> Result<Report, Violation> {
    let mut world = World::new(Plan::of(seed, limits), false);
    finish(&mut world).map(|()| report(&world))
}

/// As [`run`], with the event log.
pub fn run_logged(seed: u64, limits: &Limits) -> (Vec<String>, Result<Report, Violation>) {
    let mut world = World::new(Plan::of(seed, limits), true);
    let end = finish(&mut world).map(|()| report(&world));
    (world.log().to_vec(), end)
}

/// As [`run_logged`], its lines printed as they come.
///
/// # Errors
/// The first violation.
pub fn run_aloud(seed: u64, limits: &Limits) -> Result<Report, Violation> {
    let mut world = World::new(Plan::of(seed, limits), true);
    world.live = true;
    finish(&mut world).map(|()| report(&world))
}

fn finish(world: &mut World) -> Result<(), Violation> {
    catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        Err(Violation {
            oracle: Oracle::Panic,
            facts: text.unwrap_or("no text").to_owned(),
        })
    })
}

fn report(world: &World) -> Report {
    let (answers, errors, modes) = world.answers();
    Report {
        worlds: 1,
        steps: world.steps,
        answers,
        errors,
        modes,
        crashes: world.crashes,
        drained: world.drained,
        past: world.past(),
    }
}
