//! Announcements (SYNC-1): the owner's outbox, at most one letter per session, and what the backup makes of one
//! (`engine-ext/src/peer/announce.rs`).

use std::{collections::BTreeMap, fmt::Write as _};

use kvc_proto::{
    id::{Placement, SessionId},
    wire::{
        admit::PeerRef,
        reason::{Reason, Refusal},
    },
    worker::Announcement,
};

use super::{
    message::{CallId, Held, NodeId, PeerAsk, PeerWhat, Reply},
    process::{Process, Tick},
};

/// How long a backup may take to answer, and how often it is asked.
const ANSWER: u64 = 100_000;
const TRIES: u32 = 3;
const PAUSE: u64 = 30_000;

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Outbox {
    letters: BTreeMap<SessionId, Letter>,
    calls: BTreeMap<CallId, SessionId>,
    /// The last announcement of each session: to whom, what was committed, and whether the backup has taken it.
    pub told: BTreeMap<SessionId, Told>,
    /// The last announcement of each session that came in: placement, rewind, committed tokens.
    heard: BTreeMap<SessionId, (u64, u32, u32)>,
}

/// See [`Outbox::told`].
#[derive(Clone, Debug)]
pub struct Told {
    /// To whom.
    pub to: PeerRef,
    /// Under which placement.
    pub placement: Placement,
    /// What was committed, if the simulation knows.
    pub held: Held,
    /// The backup has answered.
    pub taken: bool,
}

#[derive(Clone, Debug)]
struct Letter {
    to: PeerRef,
    announcement: Announcement,
    call: Option<CallId>,
    tries: u32,
}

impl Outbox {
    /// What goes out for a session.
    pub fn sketch(&self, session: &SessionId, text: &mut String) {
        if let Some(letter) = self.letters.get(session) {
            let _ = write!(text, " letter {} {:?}", letter.tries, letter.announcement.epoch);
        }
    }
}

impl Process {
    /// A later letter of a session takes the place of one that has not gone out.
    pub(super) fn announce(&mut self, to: PeerRef, announcement: Announcement) {
        let session = announcement.session.clone();
        self.log(|| {
            format!(
                "announces {} tokens of {session} to {}",
                announcement.committed, to.peer
            )
        });
        let told = Told {
            to: to.clone(),
            placement: announcement.epoch.placement,
            held: self.committing.filter(|(n, _)| *n == announcement.committed),
            taken: false,
        };
        self.outbox.told.insert(session.clone(), told);
        let letter = Letter {
            to,
            announcement,
            call: None,
            tries: 0,
        };
        let before = self.outbox.letters.insert(session.clone(), letter);
        if let Some(call) = before.and_then(|l| l.call) {
            // Its answer is of no interest any more.
            self.outbox.calls.remove(&call);
        }
        self.announce_send(&session);
    }

    pub(super) fn announce_send(&mut self, session: &SessionId) {
        let Some(letter) = self.outbox.letters.get(session) else {
            return;
        };
        if letter.call.is_some() {
            return;
        }
        let Ok(node) = letter.to.peer.parse::<NodeId>() else {
            return;
        };
        let (to, what) = (letter.to.incarnation, PeerWhat::Announce(letter.announcement.clone()));
        let call = self.peer_send(node, to, what);
        self.outbox.calls.insert(call, session.clone());
        if let Some(letter) = self.outbox.letters.get_mut(session) {
            letter.call = Some(call);
            letter.tries += 1;
        }
        self.after(ANSWER, Tick::Unanswered(call));
    }

    /// True if the call was an announcement.
    pub(super) fn announce_replied(&mut self, call: CallId, reply: &Reply) -> bool {
        let Some(session) = self.outbox.calls.remove(&call) else {
            return false;
        };
        let letter = self.outbox.letters.remove(&session);
        match reply {
            Reply::Fine => {
                if let Some(told) = self.outbox.told.get_mut(&session) {
                    told.taken = true;
                }
            }
            Reply::No(why) => {
                self.log(|| format!("the announcement of {session} is refused: {why}"));
                if let Some(letter) = letter {
                    let epoch = letter.announcement.epoch;
                    self.ask(|w, now| w.announce_refused(&session, epoch, why.code, now));
                    self.dirty = true;
                }
            }
            _ => {}
        }
        true
    }

    /// True if the call was an announcement. It is dropped after a few tries: the next commit announces again.
    pub(super) fn announce_reset(&mut self, call: CallId) -> bool {
        let Some(session) = self.outbox.calls.remove(&call) else {
            return false;
        };
        if let Some(letter) = self.outbox.letters.get_mut(&session) {
            letter.call = None;
            if letter.tries < TRIES {
                self.after(PAUSE, Tick::Announce(session));
            } else {
                self.outbox.letters.remove(&session);
            }
        }
        true
    }

    /// The backup's side.
    pub(super) fn announced(&mut self, ask: &PeerAsk, announcement: &Announcement) -> Reply {
        if ask.to != self.incarnation() {
            return Reply::No(Refusal::new(Reason::StaleIncarnation, "another process"));
        }
        let from = PeerRef {
            peer: ask.peer.to_string(),
            incarnation: ask.from,
        };
        self.dirty = true;
        let before = self.w.session(&announcement.session, self.now);
        match self.ask(|w, now| w.announced(from, announcement, now)) {
            Ok(()) => {
                self.placed(
                    &announcement.session,
                    before.as_ref(),
                    Some(announcement.epoch.placement),
                );
                // Until the pull is over, well or not, nothing is known; older news is no news.
                let epoch = announcement.epoch;
                let news = (epoch.placement.n, epoch.rewind, announcement.committed);
                let last = self.outbox.heard.entry(announcement.session.clone()).or_default();
                if *last < news {
                    *last = news;
                    self.unsynced.remove(&announcement.session);
                }
                Reply::Fine
            }
            Err(why) => Reply::No(why),
        }
    }
}
