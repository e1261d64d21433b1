//! What a seed means: the sizes of the world, its clocks, its limits and its faults.

use std::time::Duration;

use kvc_proto::{
    policy::kvc::Kvc,
    routing::RouterConfig,
    wire::info::Role,
    worker::{CapacityRule, WorkerConfig},
};

use super::{clock::Time, link::Link, process::Speed, rng::Rng};

/// What a caller wants of worlds, whatever the seed.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Links lose, duplicate and are cut; workers crash, freeze and are slow; clients go away.
    pub faults: bool,
    /// Most turns per client.
    pub turns: u64,
    /// DISP-7; off to show that its oracle fires.
    pub reset_on_success: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            faults: true,
            turns: 8,
            reset_on_success: true,
        }
    }
}

/// One world.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Everything below follows from it.
    pub seed: u64,
    /// The workers' roles.
    pub roles: Vec<Role>,
    /// Their machines' numbers.
    pub workers: Vec<WorkerConfig>,
    /// Their engines' speed.
    pub speeds: Vec<Speed>,
    /// Routers.
    pub routers: usize,
    /// Their numbers.
    pub router: RouterConfig,
    /// Clients, and the sessions they share out among themselves.
    pub clients: usize,
    /// See there.
    pub sessions: usize,
    /// Most turns per client.
    pub turns: u64,
    /// Longest prompt in tokens.
    pub prompt_max: u64,
    /// Longest answer in tokens.
    pub new_max: u64,
    /// Token ids.
    pub vocabulary: u32,
    /// Thousandths of requests that go to a worker without a router.
    pub direct: u64,
    /// Thousandths of requests whose client goes away.
    pub cancel: u64,
    /// Thousandths of turns that rewind, and that append more than τ_append.
    pub rewind: u64,
    /// See there.
    pub large: u64,
    /// The routers see text and estimate tokens (ADM-14).
    pub estimated: bool,
    /// Pause between a client's turns.
    pub think: Time,
    /// Clock drift in parts per million.
    pub drift: u64,
    /// Every direction's behaviour.
    pub link: Link,
    /// Faults come until then; afterwards everything heals.
    pub faults_until: Time,
    /// Mean time between two faults; 0 for none.
    pub fault_gap: Time,
    /// Thousandths of the steps between two workers at which a fault strikes.
    pub aim: u64,
    /// Mean time between two moves that an operator asks for; 0 for none.
    pub move_gap: Time,
    /// Mean time between two drains; 0 for none.
    pub drain_gap: Time,
    /// The operator asks for something until then.
    pub operated_until: Time,
}

impl Plan {
    /// The plan of a seed.
    pub fn of(seed: u64, limits: &Limits) -> Plan {
        let rng = &mut Rng::new(seed);
        let roles = rng.pick(&[
            &[Role::Prefill, Role::Decode, Role::Decode][..],
            &[Role::Prefill, Role::Decode, Role::Decode, Role::Decode],
            &[Role::Prefill, Role::Decode, Role::Both],
            &[Role::Prefill, Role::Decode],
            &[Role::Decode, Role::Prefill, Role::Prefill, Role::Decode],
        ]);
        let page = rng.pick(&[1, 4, 4, 16]);
        let vocabulary = rng.pick(&[3, 16]);
        let prompt_max = rng.range(60, 200);
        let new_max = rng.range(4, 24);
        // Tight pools evict and retract; wide ones keep everything.
        let need = prompt_max + new_max + u64::from(page);
        let tight = rng.chance(400);
        let most = if tight { 16 } else { 40 };
        let capacity = |rng: &mut Rng| ((need * rng.range(11, most) / 10) as u32).next_multiple_of(page);
        let tau = rng.range(16, 80) as u32;
        let workers: Vec<_> = roles
            .iter()
            .map(|_| worker(rng, page, tau, new_max, capacity))
            .collect();
        // One number for all of them: routers wait it out.
        let handover = Duration::from_millis(rng.range(15, 250));
        let mut workers: Vec<WorkerConfig> = workers;
        workers.iter_mut().for_each(|w| w.handover_deadline = handover);
        let speed = |rng: &mut Rng| Speed {
            forward: rng.range(500, 4_000),
            token: rng.range(5, 60),
            chunk: rng.range(8, 64) as u32,
            running: rng.range(2, 6) as usize,
            trust: rng.pick(&[0, 300, 1000]),
            retract: rng.pick(&[0, 0, 20, 100]),
            leave: if limits.faults { rng.pick(&[0, 30]) } else { 0 },
            read: rng.range(50, 3_000),
            read_tokens: rng.range(4, 48) as usize,
            vocabulary,
        };
        let faults = limits.faults;
        let shaky = faults && rng.chance(600);
        let link = Link {
            delay: rng.range(20, 500),
            jitter: if faults { rng.range(0, 4_000) } else { 50 },
            loss: if shaky { rng.below(25) } else { 0 },
            duplicate: if shaky { rng.below(50) } else { 0 },
            cut_until: 0,
        };
        let routers = rng.range(1, 2) as usize;
        let clients = if tight { rng.range(4, 8) } else { rng.range(2, 5) } as usize;
        Plan {
            seed,
            speeds: roles.iter().map(|_| speed(rng)).collect(),
            roles: roles.to_vec(),
            workers,
            routers,
            router: router(rng, tau, handover, limits),
            clients,
            // Two clients of one session get in each other's way (ADM-8).
            sessions: if rng.chance(300) { clients - 1 } else { clients },
            turns: if tight { limits.turns / 2 + 1 } else { limits.turns },
            prompt_max,
            new_max,
            vocabulary,
            direct: rng.pick(&[0, 0, 100, 300]),
            cancel: if faults { rng.pick(&[0, 50, 150]) } else { 0 },
            rewind: rng.pick(&[50, 200, 400]),
            large: rng.pick(&[50, 200, 400]),
            estimated: rng.chance(400),
            think: rng.range(500, 40_000),
            drift: if faults { 2_000 } else { 0 },
            link,
            faults_until: if faults { rng.range(100_000, 900_000) } else { 0 },
            fault_gap: if faults { rng.range(20_000, 200_000) } else { 0 },
            aim: if faults { rng.pick(&[0, 20, 60, 150]) } else { 0 },
            move_gap: if rng.chance(700) { rng.range(8_000, 150_000) } else { 0 },
            drain_gap: if rng.chance(250) {
                rng.range(150_000, 600_000)
            } else {
                0
            },
            operated_until: rng.range(200_000, 900_000),
        }
    }
}

fn worker(rng: &mut Rng, page: u32, tau: u32, new_max: u64, mut capacity: impl FnMut(&mut Rng) -> u32) -> WorkerConfig {
    let capacity = capacity(rng);
    WorkerConfig {
        capacity,
        page_tokens: page,
        rho_permille: rng.range(900, 1000) as u32,
        max_uncached_tokens: tau,
        rule: CapacityRule::Growth,
        clip: new_max as u32,
        reservation: Duration::from_millis(rng.range(150, 800)),
        evict_idle: rng.chance(900),
        session_cap: rng.pick(&[capacity, capacity, capacity / 2]),
        lease: Duration::from_millis(rng.range(60, 400)),
        lease_max: Duration::from_millis(1_500),
        sync: rng.chance(900),
        sync_imports: rng.range(1, 2) as usize,
        sync_deadline: Duration::from_millis(rng.range(200, 900)),
        handover_deadline: Duration::ZERO,
        handover_hold: Duration::from_millis(rng.range(1, 30)),
        remembered: 64,
    }
}

fn router(rng: &mut Rng, tau: u32, handover: Duration, limits: &Limits) -> RouterConfig {
    RouterConfig {
        policy: Kvc {
            alpha: 1,
            reject_threshold: 3,
        },
        count_all_rejects: false,
        reset_on_success: limits.reset_on_success,
        admit_direct: rng.chance(800),
        max_uncached_tokens: tau,
        ask_unknown: rng.chance(800),
        max_sessions: rng.pick(&[2, 100]),
        busy_wait: Duration::from_millis(300),
        max_executions: 3,
        import_deadline: Duration::from_millis(rng.range(100, 1_000)),
        sync: rng.chance(900),
        handover_wait: handover * 2,
    }
}
