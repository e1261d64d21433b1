//! Worlds that are known traps of moving KV (kv-movement §2, §4, §5), each a script with every delivery by hand. A test
//! that fails prints what happened in its world.

use kvc_proto::{
    id::Incarnation,
    wire::{
        admit::{Source, WithdrawAnswer},
        info::Standing,
        reason::Reason,
    },
    worker::WorkerConfig,
};
use kvc_tests::sim::{
    message::{Ask, Message, PeerWhat, Reply},
    play::{Play, Told, small, workers},
    stage::{Stage, Wire},
};

/// A world whose log is printed if the test fails.
struct Trap(Play);

impl Trap {
    fn new(decode: usize, prefill: usize, config: &WorkerConfig) -> Trap {
        Trap(Play::new(Stage::new(workers(decode, prefill, config), true), "s"))
    }

    /// Whatever has happened, no rule is broken.
    fn sound(&mut self) {
        let end = self.0.check();
        assert!(end.is_ok(), "{end:?}");
    }
}

impl Drop for Trap {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stage.log.iter().flatten().for_each(|line| println!("{line}"));
        }
    }
}

fn between(a: usize, b: usize) -> impl Fn(&Wire) -> bool {
    move |w| [a, b].contains(&w.from) && [a, b].contains(&w.to)
}

fn peer(wire: &Wire) -> Option<&PeerWhat> {
    match &wire.message {
        Message::Ask(_, Ask::Peer(ask)) => Some(&ask.what),
        _ => None,
    }
}

fn is_handover_answer(wire: &Wire) -> bool {
    matches!(&wire.message, Message::Reply(_, Reply::HandedOver(_)))
}

/// Everything between the workers arrives and time passes, until nothing more comes of it.
fn settle(play: &mut Play, times: usize) {
    for _ in 0..times {
        play.stage.deliver_all(|_| true);
        play.stage.wait(10_000);
    }
}

#[test]
fn two_workers_that_import_from_each_other_both_come_to_an_end() {
    // XFER-7, SES-3: each holds a session that the other has no room for as long as its own is leased. Nobody waits for
    // ever: what moves, moves; what does not stays where it was, and no page is lost.
    for capacity in [40, 48, 64, 96] {
        let mut trap = Trap::new(2, 0, &small(capacity));
        let mut other = {
            let play = &mut trap.0;
            play.say(1..=20);
            assert_eq!(play.turn(0, 1, 4, None), Told::Tokens(4));
            let stage = play.stage.clone();
            let mut other = Play::new(stage, "r");
            other.say((1..=22).rev());
            assert_eq!(other.turn(1, 2, 4, None), Told::Tokens(4));
            other
        };
        let there = trap.0.session.clone();
        trap.0.stage = other.stage.clone();
        let first = trap.0.prepare(0, 1, 3);
        other.stage = trap.0.stage.clone();
        let second = other.prepare(1, 0, 4);
        // One message at a time, from either side.
        for _ in 0..400 {
            if other.stage.wires.is_empty() && !other.stage.pass() {
                break;
            }
            if !other.stage.wires.is_empty() {
                other.stage.deliver(0);
            }
        }
        trap.0.stage = other.stage;
        trap.sound();
        let play = &mut trap.0;
        let ends = [first, second].map(|call| play.imported(call));
        assert!(ends.iter().all(Option::is_some), "capacity {capacity}: {ends:?}");
        let owner = usize::from(ends[0].is_some_and(|e| e.is_ok()));
        assert_eq!(
            play.owners(),
            [owner],
            "capacity {capacity}: the session {there} has one owner"
        );
        let held = play.standing(owner).map_or(0, |(_, _, tokens)| tokens);
        // Where both do not fit the engine may have taken an idle session's KV; else it is all there.
        assert!(
            held == 23 || capacity < 64,
            "capacity {capacity}: {owner} holds {held} tokens"
        );
        settle(play, 300);
        for node in 0..2 {
            let process = play.stage.process(node);
            let counts = process.w.counts();
            assert_eq!((counts.1, counts.2), (0, 0), "leases and imports of worker {node}");
        }
    }
}

#[test]
fn the_same_session_imported_both_ways() {
    // SYNC-1, SYNC-2: worker 1 reseeds from worker 0 under a granted number while worker 0 is told to follow worker 1.
    let mut trap = Trap::new(2, 0, &small(96));
    let play = &mut trap.0;
    play.say(1..=20);
    assert_eq!(play.turn(0, 1, 4, None), Told::Tokens(4));
    play.say([7, 7]);
    let grant = play.admit(1, 2, 4, None).and_then(|a| a.reservation);
    assert!(grant.is_some());
    let reseed = play.import(1, grant, Source::Replica, 2, 0);
    let follow = play.import(0, None, Source::Replica, 2, 1);
    settle(play, 100);
    assert!(
        play.imported(reseed).is_some_and(|e| e.is_ok()),
        "the reseed has its KV"
    );
    assert!(play.imported(follow).is_some(), "and the other way came to an end");
    assert_eq!(play.run(1, 2, grant, 4), Told::Tokens(4));
    assert_eq!(play.owners(), [1]);
    trap.sound();
}

#[test]
fn a_rewind_under_a_lease_revokes_it_before_a_page_is_written() {
    // OWN-7, XFER-2, XFER-3: the backup has read half of the old history when the client takes it back.
    let mut trap = Trap::new(1, 1, &small(96));
    let play = &mut trap.0;
    play.say(1..=30);
    assert_eq!(play.turn(0, 1, 4, Some(1)), Told::Tokens(4));
    let reading = |w: &Wire| matches!(peer(w), Some(PeerWhat::Read(..)));
    play.stage.deliver_all(|w| !reading(w));
    assert_eq!(play.stage.wires.len(), 1, "the backup's read is on its way");
    play.take_back(12);
    play.say([9, 9, 9]);
    assert_eq!(play.turn(0, 1, 4, Some(1)), Told::Tokens(4));
    // The read reaches a lease that is over; nothing of the old tail becomes visible.
    play.stage.deliver(0);
    trap.sound();
    let play = &mut trap.0;
    let (standing, _, tokens) = play.standing(1).expect("the backup knows the session");
    assert_eq!(standing, Standing::Replica);
    assert_eq!(tokens, 0, "an unconfirmed pull leaves nothing");
    settle(play, 120);
    let (owner, name) = (0, play.session.clone());
    let held = [owner, 1].map(|n| play.stage.process(n).held(&name));
    assert_eq!(held[0], held[1], "then it follows the new history");
    trap.sound();
}

#[test]
fn a_commit_answer_lost_and_then_its_source_dies() {
    // MIG-2: the source has granted, nobody has heard, and it is gone. The target is asked, withdraws for good, and its
    // copy serves as replica under a new placement; the turn is served once.
    let mut trap = Trap::new(3, 0, &small(96));
    let play = &mut trap.0;
    play.say(1..=20);
    assert_eq!(play.turn(0, 1, 4, None), Told::Tokens(4));
    let call = play.prepare(0, 1, 2);
    play.stage.deliver_all(|w| !is_handover_answer(w));
    assert_eq!(
        play.standing(0).map(|s| s.0),
        Some(Standing::Moved),
        "the source has decided"
    );
    let answer = play
        .stage
        .wires
        .iter()
        .position(is_handover_answer)
        .expect("its answer");
    play.stage.lose(answer);
    play.stage.crash(0);
    settle(play, 20);
    assert_eq!(play.owners(), [0; 0], "nobody owns it");
    assert_eq!(play.withdraw(1, 2), Some(WithdrawAnswer::Withdrawn));
    settle(play, 20);
    assert!(matches!(play.imported(call), Some(Err(_))), "the move is over");
    // Even if the source's word came now.
    play.stage.start(0);
    play.say([5, 5]);
    assert_eq!(play.reseed(2, 3, 1, 4), Told::Tokens(4));
    assert_eq!(play.owners(), [2]);
    let (standing, _, tokens) = play.standing(1).expect("the target keeps its copy");
    assert_eq!((standing, tokens), (Standing::Replica, 23));
    trap.sound();
}

#[test]
fn a_hand_over_answer_that_comes_too_late_is_asked_for_again() {
    // MIG-2: the source's word lies in the network for longer than the hand-over deadline.
    let mut trap = Trap::new(2, 0, &small(96));
    let play = &mut trap.0;
    play.say(1..=20);
    assert_eq!(play.turn(0, 1, 4, None), Told::Tokens(4));
    let call = play.prepare(0, 1, 2);
    play.stage.deliver_all(|w| !is_handover_answer(w));
    play.stage.wait(55_000);
    play.stage.deliver_all(is_handover_answer);
    assert_eq!(play.owners(), [0; 0], "an old word is none");
    settle(play, 20);
    assert_eq!(play.owners(), [1], "the same question gets the same answer again");
    assert!(play.imported(call).is_some_and(|e| e.is_ok()));
    play.say([5]);
    assert_eq!(play.turn(0, 1, 4, None), Told::NotAdmitted(Reason::Moved));
    assert_eq!(play.turn(1, 2, 4, None), Told::Tokens(4));
    trap.sound();
}

#[test]
fn a_partitioned_source_that_rewinds_learns_that_it_owns_nothing() {
    // SES-4, MIG-3: worker 0 is cut off from routers and backup; the session goes on at worker 1 from the backup's
    // replica. Then a client that still reaches worker 0 rewinds there.
    let mut trap = Trap::new(2, 1, &small(96));
    let play = &mut trap.0;
    let (cut_off, next, backup) = (0, 1, 2);
    play.say(1..=20);
    assert_eq!(play.turn(cut_off, 1, 4, Some(backup)), Told::Tokens(4));
    settle(play, 20);
    assert_eq!(play.standing(backup).map(|s| s.2), Some(23), "the replica is complete");
    let mut old = play.history.clone();
    play.say([5, 5]);
    assert_eq!(play.reseed(next, 2, backup, 4), Told::Tokens(4));
    assert_eq!(play.owners(), [0, 1], "each under its own number");
    let new = std::mem::take(&mut play.history);
    // The other side of the cut.
    old.truncate(9);
    play.history = old;
    play.say([1, 1]);
    assert_eq!(
        play.turn(cut_off, 1, 4, Some(backup)),
        Told::Tokens(4),
        "it cannot know"
    );
    // The first message that passes tells it.
    play.stage.deliver_all(between(cut_off, backup));
    assert_eq!(play.owners(), [next]);
    assert_eq!(play.standing(cut_off).map(|s| s.0), Some(Standing::Replica));
    play.say([1]);
    assert_eq!(
        play.turn(cut_off, 1, 4, Some(backup)),
        Told::NotAdmitted(Reason::StaleEpoch)
    );
    // And no byte of its history has reached the replica.
    play.history = new;
    play.say([6]);
    assert_eq!(play.turn(next, 2, 4, Some(backup)), Told::Tokens(4));
    settle(play, 20);
    let name = play.session.clone();
    let held = [next, backup].map(|n| play.stage.process(n).held(&name));
    assert!(held[0].is_some() && held[0] == held[1], "{held:?}");
    trap.sound();
}

#[test]
fn an_announcement_lost_across_a_rewind_leaves_no_spliced_history() {
    // SYNC-1, XFER-3: the backup never hears of the rewound turn; the next announcement is one of a history that shares
    // only its beginning with what it holds. An old announcement that comes after it changes nothing.
    let mut trap = Trap::new(2, 1, &small(128));
    let play = &mut trap.0;
    let (owner, next, backup) = (0, 1, 2);
    let announcement = |w: &Wire| matches!(peer(w), Some(PeerWhat::Announce(_)));
    play.say(1..=24);
    assert_eq!(play.turn(owner, 1, 4, Some(backup)), Told::Tokens(4));
    let at = play.stage.wires.iter().position(announcement).expect("an announcement");
    play.stage.duplicate(at);
    play.stage.deliver_all(|w| !announcement(w));
    assert_eq!(play.standing(backup).map(|s| s.2), Some(27));
    // A copy of the first announcement is still on its way.
    assert_eq!(play.stage.wires.len(), 1);
    play.take_back(10);
    play.say([2, 4, 6, 8]);
    assert_eq!(play.turn(owner, 1, 4, Some(backup)), Told::Tokens(4));
    let lost = play.stage.wires.iter().rposition(announcement).expect("the second one");
    play.stage.lose(lost);
    play.say([3; 10]);
    assert_eq!(play.turn(owner, 1, 4, Some(backup)), Told::Tokens(4));
    let third = play.stage.wires.iter().rposition(announcement).expect("the third one");
    play.stage.deliver(third);
    play.stage.deliver_all(|w| !announcement(w));
    settle(play, 60);
    let name = play.session.clone();
    let held = [owner, backup].map(|n| play.stage.process(n).held(&name));
    assert!(held[0].is_some() && held[0] == held[1], "{held:?}");
    // A reseed from it continues the new history.
    play.stage.crash(owner);
    play.say([9]);
    assert_eq!(play.reseed(next, 2, backup, 4), Told::Tokens(4));
    assert_eq!(play.owners(), [next]);
    trap.sound();
}

#[test]
fn a_source_that_restarts_is_another_process() {
    // F16, SES-4: the target asks who came after its source at the same address.
    let mut trap = Trap::new(2, 0, &small(96));
    let play = &mut trap.0;
    play.say(1..=20);
    assert_eq!(play.turn(0, 1, 4, None), Told::Tokens(4));
    let call = play.prepare(0, 1, 2);
    let question = |w: &Wire| matches!(peer(w), Some(PeerWhat::Handover(..)));
    play.stage.deliver_all(|w| !question(w));
    assert!(play.stage.wires.iter().any(question), "the question is on its way");
    play.stage.crash(0);
    play.stage.start(0);
    assert_eq!(play.stage.process(0).incarnation(), Incarnation(2));
    settle(play, 20);
    assert_eq!(play.imported(call), Some(Err(Reason::StaleIncarnation)));
    assert_eq!(play.owners(), [0; 0]);
    play.say([5]);
    assert_eq!(
        play.turn(1, 3, 4, None),
        Told::Tokens(4),
        "its copy serves under a new number"
    );
    trap.sound();
}
