//! Every course of one dispatch, with another session's traffic left out: all answers at every step, for one to three
//! workers, to a stated depth.

use std::collections::HashMap;

use super::{
    Dispatch, Effect, Event, MemoryStore, Outcome, Resident, Router, RouterConfig, SessionStore, Turn, WorkerIndex,
    session::Pending,
    testing::{admits, refuses, view},
};
use crate::{
    id::{Epoch, Incarnation, Placement, RouterId, SessionId, StoreId},
    time::Now,
    wire::{
        admit::{Mode, MovedTo, PeerRef, WithdrawAnswer},
        info::{Role, Standing},
        reason::Reason,
    },
};

/// Events along one course. Longer courses exist only through pauses, which the deadline bounds.
const DEPTH: usize = 6;
/// The same, of a session that is known: its first event is an answer.
const DEPTH_KNOWN: usize = 6;

/// What can come of an effect; `None` is the end of a pause.
fn choices(effect: &Effect) -> Vec<Option<Event>> {
    let placement = Placement {
        n: 50,
        store: StoreId(5),
    };
    let owned = Epoch { placement, rewind: 0 };
    let epoch = Some(owned);
    let held = |worker, tokens| Resident {
        worker,
        tokens,
        epoch,
        standing: Standing::Replica,
        moved: None,
    };
    let answer = |a| Some(Event::Answer(Box::new(a)));
    let mut events = match effect {
        Effect::Ask { .. } => vec![
            Some(Event::Residents(vec![])),
            Some(Event::Residents(vec![Resident {
                standing: Standing::Owner,
                ..held(WorkerIndex(1), 80)
            }])),
        ],
        Effect::Locate { workers, .. } => vec![
            Some(Event::Located(vec![])),
            Some(Event::Located(workers.iter().map(|w| held(*w, 80)).collect())),
        ],
        Effect::Withdraw { .. } => vec![
            Some(Event::Withdrawn(WithdrawAnswer::Withdrawn)),
            Some(Event::Withdrawn(WithdrawAnswer::Owner { epoch: owned })),
            Some(Event::WithdrawRefused(Reason::StaleIncarnation)),
            Some(Event::WithdrawRefused(Reason::Internal)),
            Some(Event::Unreachable),
        ],
        Effect::Probe { worker, request } => {
            let mode = if request.turn == 0 { Mode::Seed } else { Mode::Reseed };
            let mut stale = refuses(*worker, Reason::StaleEpoch, 0);
            stale.epoch = epoch;
            let mut restarted = refuses(*worker, Reason::StaleIncarnation, 0);
            restarted.incarnation.0 += 100;
            let mut moved = refuses(*worker, Reason::Moved, 80);
            let to = PeerRef {
                peer: "127.0.0.1:2".into(),
                // D0 says D1, all others say D0.
                incarnation: Incarnation(if worker.0 == 0 { 2 } else { 1 }),
            };
            moved.moved = Some(MovedTo { to, placement });
            vec![
                answer(admits(*worker, mode, 0)),
                answer(admits(*worker, Mode::Direct, 80)),
                answer(refuses(*worker, Reason::NoDCapacity, 80)),
                answer(refuses(*worker, Reason::RealLargeAppend, 80)),
                answer(refuses(*worker, Reason::SessionBusy, 80)),
                answer(refuses(*worker, Reason::TooLarge, 0)),
                answer(refuses(*worker, Reason::Draining, 0)),
                answer(stale),
                answer(restarted),
                answer(moved),
                Some(Event::Unreachable),
            ]
        }
        Effect::HandOver(h) => {
            let mut events = vec![Some(Event::Imported), Some(Event::ImportFailed(Reason::TransferFailed))];
            events.extend(h.prefill.as_ref().map(|_| Some(Event::PrefillFailed)));
            events
        }
        Effect::Run { .. } => vec![
            Some(Event::TurnRefused(Reason::NoDCapacity)),
            Some(Event::TurnRefused(Reason::RealLargeAppend)),
            Some(Event::TurnRefused(Reason::SessionBusy)),
            Some(Event::TurnRefused(Reason::Moved)),
            Some(Event::Passed),
            Some(Event::Failed(Reason::PeerUnreachable)),
            Some(Event::FirstByte),
        ],
        Effect::Wait { .. } => vec![None],
        Effect::Release { .. } | Effect::Placed { .. } | Effect::Refuse(_) => vec![],
    };
    events.push(Some(Event::ClientGone));
    events
}

struct Course {
    router: Router<MemoryStore>,
    dispatch: Dispatch,
    now: Now,
    /// The effect that waits for its event.
    open: Option<Effect>,
    streaming: bool,
    refusals: u32,
    released: HashMap<(WorkerIndex, u32), u32>,
}

/// What the router knows when the turn comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Known {
    Nothing,
    /// The last worker runs it, the first one keeps a replica or an older copy.
    Session,
    /// As before, and a move to the last but one is out.
    Move,
}

impl Course {
    fn new(roles: &[Role], config: &RouterConfig, known: Known) -> Course {
        let store = MemoryStore::new(StoreId(1));
        let mut router = Router::new(config.clone(), RouterId(1), store, view(roles));
        if known != Known::Nothing {
            let session = SessionId::new("s").expect("plain");
            assert!(router.sessions.open(&session));
            let last = WorkerIndex(roles.len() as u16 - 1);
            let (first, pin) = (router.view.at(WorkerIndex(0)), router.view.at(last));
            let target = router.view.at(WorkerIndex(last.0 - 1));
            let placement = |n| Placement { n, store: StoreId(1) };
            let record = router.sessions.record_mut(&session).expect("opened");
            record.turns = 1;
            record.replica = Some(first).filter(|_| roles[0] == Role::Prefill);
            record.holds(first, 40);
            record.lives_at(pin, placement(1), 80);
            record.pending = (known == Known::Move).then_some(Pending {
                target,
                incarnation: Incarnation(u64::from(target.worker.0) + 1),
                placement: placement(2),
                since: Now(0),
                lost: None,
            });
            router.sessions.close(&session);
            // 1 and 2 are given out.
            router.store.take(&session, None);
            router.store.take(&session, None);
        }
        let turn = Turn {
            session: SessionId::new("s").ok(),
            input_tokens: 100,
            max_new_tokens: None,
            estimated: true,
        };
        let dispatch = Dispatch::start(&mut router, turn, Now(0));
        let mut course = Course {
            router,
            dispatch,
            now: Now(0),
            open: None,
            streaming: false,
            refusals: 0,
            released: HashMap::new(),
        };
        course.drain();
        course
    }

    /// Takes the effects that wait; there is one open question at most.
    fn drain(&mut self) {
        while let Some(effect) = self.dispatch.poll_effect() {
            match effect {
                Effect::Release { worker, request, .. } => {
                    *self.released.entry((worker, request.attempt)).or_default() += 1;
                }
                Effect::Placed { .. } => {}
                Effect::Refuse(_) => self.refusals += 1,
                effect => assert!(self.open.replace(effect).is_none(), "two open questions"),
            }
        }
    }

    fn options(&self) -> Vec<Option<Event>> {
        match &self.open {
            _ if self.dispatch.outcome().is_some() => vec![],
            Some(effect) => choices(effect),
            None if self.streaming => vec![
                Some(Event::Completed { output_tokens: 4 }),
                Some(Event::Failed(Reason::TransferFailed)),
                Some(Event::ClientGone),
            ],
            None => panic!("the dispatch waits for nothing and is not over"),
        }
    }

    fn step(&mut self, event: Option<Event>) {
        self.now = Now(self.now.0 + 1);
        match (event, self.open.take()) {
            (None, Some(Effect::Wait { until })) => {
                self.now = self.now.max(until);
                self.dispatch.handle_timeout(&mut self.router, self.now);
            }
            (Some(event), _) => {
                self.streaming = event == Event::FirstByte;
                self.dispatch
                    .handle(&mut self.router, event, self.now)
                    .expect("offered events are expected");
            }
            (None, other) => panic!("no pause: {other:?}"),
        }
        self.drain();
        let active: u32 = self
            .router
            .view
            .all()
            .map(|w| self.router.view.worker(w).inflight())
            .sum();
        assert!(active <= 2, "one decode and one prefill at most");
    }

    fn check_end(&self) {
        let Some(outcome) = self.dispatch.outcome() else { return };
        assert!(self.open.is_none(), "an open question after the end");
        assert_eq!(
            self.refusals,
            u32::from(matches!(outcome, Outcome::Refused(_))),
            "exactly one answer"
        );
        for w in self.router.view.all() {
            assert_eq!(
                self.router.view.worker(w).inflight(),
                0,
                "inflight goes down exactly once"
            );
        }
        assert_eq!(self.router.sessions().busy(), 0);
        assert!(self.released.values().all(|&n| n == 1), "a grant is released once");
        assert!(self.dispatch.trace().ended.is_some());
        let pinned = self
            .router
            .sessions()
            .peek(&SessionId::new("s").expect("plain"))
            .and_then(|r| r.pin);
        let mode = self.dispatch.trace().mode;
        if outcome == Outcome::Completed && mode != Some(super::ExecutionMode::Fallback) {
            assert_eq!(pinned.map(|at| at.worker), self.dispatch.trace().worker, "DISP-1");
        }
    }
}

/// Depth first; a course is replayed from its start, so nothing needs to be cloned. Returns (courses that ended,
/// courses cut at the depth).
fn explore(roles: &[Role], config: &RouterConfig, known: Known) -> (u64, u64) {
    let (mut ended, mut cut) = (0, 0);
    let depth = if known == Known::Nothing { DEPTH } else { DEPTH_KNOWN };
    let mut path: Vec<usize> = Vec::new();
    loop {
        let mut course = Course::new(roles, config, known);
        let mut widths = Vec::new();
        let mut at = 0;
        loop {
            let options = course.options();
            if options.is_empty() {
                ended += 1;
                break;
            }
            if at == depth {
                cut += 1;
                // Wherever it is cut, the client can leave and nothing stays behind.
                course.step(Some(Event::ClientGone));
                break;
            }
            if path.len() == at {
                path.push(0);
            }
            widths.push(options.len());
            course.step(options.into_iter().nth(path[at]).expect("within the width"));
            at += 1;
        }
        course.check_end();
        path.truncate(at);
        loop {
            let Some(last) = path.last_mut() else {
                return (ended, cut);
            };
            *last += 1;
            if *last < widths[path.len() - 1] {
                break;
            }
            path.pop();
        }
    }
}

#[test]
fn every_course_ends_in_one_answer_and_leaves_nothing() {
    // DISP-1..9; the pause and the busy deadline are equal here, so that one pause is all there is.
    let config = RouterConfig {
        busy_wait: std::time::Duration::from_millis(2),
        max_executions: 2,
        ..RouterConfig::default()
    };
    let worlds: [&[Role]; 4] = [
        &[Role::Decode, Role::Decode],
        &[Role::Both, Role::Both, Role::Both],
        &[Role::Prefill, Role::Decode],
        &[Role::Prefill, Role::Decode, Role::Decode],
    ];
    for roles in worlds {
        for known in [Known::Nothing, Known::Session, Known::Move] {
            let (ended, cut) = explore(roles, &config, known);
            assert!(
                ended > 1000,
                "{roles:?} {known:?}: {ended} courses ended, {cut} were cut"
            );
            println!("{roles:?} {known:?}: {ended} courses ended, {cut} were cut");
        }
    }
}

#[test]
fn a_known_sessions_courses_without_the_question_end_too() {
    let config = RouterConfig {
        busy_wait: std::time::Duration::from_millis(2),
        max_executions: 2,
        admit_direct: false,
        ..RouterConfig::default()
    };
    for known in [Known::Nothing, Known::Session, Known::Move] {
        let (ended, _) = explore(&[Role::Both, Role::Both], &config, known);
        assert!(ended > 1000);
    }
}
