//! What a router's dispatches want done, done with messages (`router/src/drive.rs`, `worker.rs`).

use kvc_proto::{
    routing::{Effect, Handover, WorkerIndex},
    wire::{admit::ReleaseRequest, turn::TurnTag},
};

use super::{
    client::Request,
    clock::Time,
    message::{Ask, CallId, Message, NodeId, TurnAsk},
    router::{ADMIT, Call, FIRST_TOKEN, Node, Out, Tick},
};

impl Node {
    pub(super) fn effect(&mut self, number: u64, request: &Request, effect: Effect) {
        self.log(|| {
            format!(
                "request {} of client {}: {}",
                request.number,
                request.client,
                brief(&effect)
            )
        });
        match effect {
            Effect::Ask { session, workers } | Effect::Locate { session, workers } if workers.is_empty() => {
                let _ = session;
                self.asked_all(number);
            }
            Effect::Ask { session, workers } => self.ask_all(number, false, &session, &workers),
            Effect::Locate { session, workers } => self.ask_all(number, true, &session, &workers),
            Effect::Probe { worker, request } => {
                if let Some(placement) = request.placement {
                    self.check_pending(&request.session_id, placement);
                }
                let kind = Call::Admit(worker);
                self.call(number, kind, worker, Ask::Admit(request), ADMIT);
            }
            Effect::Withdraw {
                worker,
                session,
                request,
            } => self.call(number, Call::Withdraw, worker, Ask::Withdraw(session, request), ADMIT),
            Effect::HandOver(handover) => {
                self.check_pending(&handover.session, handover.import.placement);
                let refresh = handover
                    .prefill
                    .as_ref()
                    .and_then(|p| Some((p.worker, p.refresh.clone()?)));
                match refresh {
                    None => self.hand_over(number, request, *handover),
                    Some((worker, import)) => {
                        let within = self.within();
                        let ask = Ask::Import(handover.session.clone(), import);
                        if let Some(live) = self.live.get_mut(&number) {
                            live.handover = Some(handover);
                        }
                        self.call(number, Call::Refresh, worker, ask, within);
                    }
                }
            }
            Effect::Run { worker, tag } => {
                let body = turn(request, tag);
                self.call(number, Call::Run, worker, Ask::Turn(Box::new(body)), FIRST_TOKEN);
            }
            Effect::Wait { until } => self.out.push(Out::Until(until, Tick::Wake(number))),
            Effect::Release {
                worker,
                session,
                request,
            } => {
                self.next += 1;
                let question = ReleaseRequest {
                    request: Some(request),
                    drop_kv: false,
                    placed: None,
                };
                let ask = Message::Ask(self.next, Ask::Release(session, question));
                self.out.push(Out::Send(worker.0.into(), ask));
            }
            Effect::Placed {
                worker,
                session,
                placement,
            } => {
                self.next += 1;
                let question = ReleaseRequest {
                    placed: Some(placement),
                    ..ReleaseRequest::default()
                };
                let ask = Message::Ask(self.next, Ask::Release(session, question));
                self.out.push(Out::Send(worker.0.into(), ask));
            }
            Effect::Refuse(_) => {}
        }
    }

    /// The prefill worker has what others held, or has not.
    pub(super) fn refreshed(&mut self, number: u64) {
        let Some(live) = self.live.get_mut(&number) else { return };
        let request = live.request.clone();
        if let Some(handover) = live.handover.take() {
            self.hand_over(number, &request, *handover);
        }
    }

    /// DISP-3: prefill and import side by side.
    fn hand_over(&mut self, number: u64, request: &Request, handover: Handover) {
        let within = self.within();
        if let Some(prefill) = handover.prefill {
            let body = turn(request, Some(prefill.tag));
            let ask = Ask::Turn(Box::new(body));
            self.call(number, Call::Prefill, prefill.worker, ask, within);
        }
        let import = Ask::Import(handover.session, handover.import);
        self.call(number, Call::Import, handover.decode, import, within + ADMIT);
    }

    pub(super) fn within(&self) -> Time {
        self.router.config().import_deadline.as_micros() as u64
    }

    fn ask_all(&mut self, number: u64, locating: bool, session: &kvc_proto::id::SessionId, workers: &[WorkerIndex]) {
        if let Some(live) = self.live.get_mut(&number) {
            live.locating = locating;
        }
        for worker in workers {
            let ask = Ask::Session(session.clone());
            self.call(number, Call::Session(*worker), *worker, ask, ADMIT);
        }
    }

    pub(super) fn call(&mut self, number: u64, kind: Call, worker: WorkerIndex, ask: Ask, within: Time) {
        self.next += 1;
        // The call's number tells its worker: closing needs no table.
        let call = self.next << 8 | u64::from(worker.0);
        self.calls.insert(call, (number, kind));
        self.out.push(Out::Send(worker.0.into(), Message::Ask(call, ask)));
        self.out.push(Out::After(within, Tick::Deadline(call)));
    }

    pub(super) fn worker_of(&self, call: CallId) -> Option<NodeId> {
        usize::try_from(call & 0xff)
            .ok()
            .filter(|w| *w < self.router.view.len())
    }

    pub(super) fn close_calls(&mut self, number: u64, which: impl Fn(&Call) -> bool) {
        let dead: Vec<CallId> = self
            .calls
            .iter()
            .filter(|(_, (n, c))| *n == number && which(c))
            .map(|(c, _)| *c)
            .collect();
        for call in dead {
            self.calls.remove(&call);
            if let Some(worker) = self.worker_of(call) {
                self.out.push(Out::Send(worker, Message::Close(call)));
            }
        }
    }

    pub(super) fn log(&mut self, line: impl FnOnce() -> String) {
        if self.logging {
            self.out.push(Out::Log(line()));
        }
    }

    /// Its node.
    pub fn id(&self) -> NodeId {
        self.id
    }
}

/// A client's request as an engine gets it.
pub(super) fn turn(request: &Request, tag: Option<TurnTag>) -> TurnAsk {
    TurnAsk {
        tag,
        identity: request.identity.clone(),
        prompt: request.prompt.clone(),
        max_new: request.max_new,
        stream: request.stream,
    }
}

fn brief(effect: &Effect) -> String {
    match effect {
        Effect::Ask { workers, .. } => format!("asks {workers:?} who holds it"),
        Effect::Locate { workers, .. } => format!("asks {workers:?} for its KV"),
        Effect::Probe { worker, request } => format!(
            "asks {} for {} tokens, {} new, placement {:?}",
            worker.0,
            request.input_tokens,
            request.append_tokens,
            request.placement.map(|p| p.n)
        ),
        Effect::Withdraw { worker, request, .. } => {
            format!(
                "asks {} what became of the move under {}",
                worker.0, request.placement.n
            )
        }
        Effect::HandOver(h) => {
            let from = h.prefill.as_ref().map_or("nobody".to_owned(), |p| {
                let first = p
                    .refresh
                    .as_ref()
                    .map_or(String::new(), |r| format!(" after an import from {}", r.peer));
                format!("{}{first}", p.worker.0)
            });
            format!(
                "{from} prefills, {} imports from {} under {}",
                h.decode.0, h.import.peer, h.import.placement.n
            )
        }
        Effect::Run { worker, tag } => format!(
            "runs on {} tag {}",
            worker.0,
            tag.as_ref().map_or(String::new(), |t| t.to_string())
        ),
        other => format!("{other:?}"),
    }
}
