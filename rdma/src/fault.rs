//! Faults that a peer can have, for tests here and above: the loopback exporter has them by itself
//! ([`crate::loopback::Faults`]), a tcp exporter behind a [`Proxy`].

use std::{
    collections::HashMap,
    io::{self, Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc, Condvar, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// What goes wrong with the bytes a peer sends. `after` counts them per stream: answers with their frames over tcp,
/// payload over loopback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The peer's process ends: its streams break, new ones are refused.
    Die {
        /// Bytes that still come.
        after: u64,
    },
    /// The stream ends in order, wherever it is.
    Truncate {
        /// Bytes that still come.
        after: u64,
    },
    /// Nothing more comes, and nothing says so.
    Stall {
        /// Bytes that still come.
        after: u64,
    },
    /// One bit of one byte is flipped.
    Corrupt {
        /// Bytes before it.
        at: u64,
    },
    /// All bytes come late.
    Delay {
        /// Before every piece.
        pause: Duration,
    },
}

/// What a fault makes of the next bytes of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// So many pass as they are.
    Pass(usize),
    /// So many pass, the byte at the index with a flipped bit.
    Flip(usize, usize),
    Die,
    End,
    Stall,
}

impl Fault {
    /// What becomes of the next `len` bytes (not zero) of a stream that has sent `sent`.
    pub(crate) fn effect(self, sent: u64, len: usize) -> Effect {
        let within = |after: u64, then| match usize::try_from(after.saturating_sub(sent)) {
            Ok(0) => then,
            left => Effect::Pass(left.unwrap_or(usize::MAX).min(len)),
        };
        match self {
            Fault::Die { after } => within(after, Effect::Die),
            Fault::Truncate { after } => within(after, Effect::End),
            Fault::Stall { after } => within(after, Effect::Stall),
            Fault::Corrupt { at } => match usize::try_from(at.wrapping_sub(sent)) {
                Ok(index) if at >= sent && index < len => Effect::Flip(len, index),
                _ => Effect::Pass(len),
            },
            Fault::Delay { .. } => Effect::Pass(len),
        }
    }

    pub(crate) fn pause(self) -> Duration {
        if let Fault::Delay { pause } = self {
            pause
        } else {
            Duration::ZERO
        }
    }
}

/// Stands before a tcp exporter and has its faults; without one it passes bytes on. One pair of threads per connection.
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    listener: Option<JoinHandle<()>>,
}

struct Shared {
    target: SocketAddr,
    fault: Mutex<Option<Fault>>,
    stop: AtomicBool,
    dead: AtomicBool,
    /// Answer bytes passed on, of all connections.
    passed: AtomicU64,
    /// Both sockets of each connection, to break them.
    sockets: Mutex<HashMap<u64, [TcpStream; 2]>>,
    wake: Condvar,
}

impl Proxy {
    /// Listens on a free loopback port.
    ///
    /// # Errors
    /// As the system says.
    pub fn start(target: SocketAddr) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            fault: Mutex::new(None),
            stop: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            passed: AtomicU64::new(0),
            sockets: Mutex::default(),
            wake: Condvar::new(),
        });
        let listener = thread::spawn({
            let shared = shared.clone();
            move || shared.accept(&listener)
        });
        Ok(Proxy {
            shared,
            address,
            listener: Some(listener),
        })
    }

    /// What the importer is given instead of the exporter's endpoint.
    pub fn endpoint(&self) -> String {
        self.address.to_string()
    }

    /// From now on streams have this fault; `None` heals new ones.
    pub fn inject(&self, fault: Option<Fault>) {
        *self.shared.fault.lock().unwrap_or_else(PoisonError::into_inner) = fault;
        self.shared.dead.store(false, Ordering::SeqCst);
    }

    /// Answer bytes passed on so far, of all connections.
    pub fn passed(&self) -> u64 {
        self.shared.passed.load(Ordering::SeqCst)
    }

    /// Breaks every connection, as a process does that ends.
    pub fn cut(&self) {
        self.shared.cut();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.cut();
        // Wakes the listener, which looks at `stop` after each connection.
        let _ = TcpStream::connect(self.address);
        if let Some(listener) = self.listener.take() {
            let _ = listener.join();
        }
    }
}

impl Shared {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut next = 0;
        for client in listener.incoming() {
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let Ok(client) = client else { continue };
            if self.dead.load(Ordering::SeqCst) {
                continue;
            }
            next += 1;
            // A connection that cannot be set up is dropped: the importer sees its peer go.
            let _ = self.join(next, client);
        }
    }

    fn join(self: &Arc<Self>, id: u64, client: TcpStream) -> io::Result<()> {
        let server = TcpStream::connect(self.target)?;
        let pair = [client.try_clone()?, server.try_clone()?];
        self.sockets
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(id, pair);
        let (mut up_from, mut up_to) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ = io::copy(&mut up_from, &mut up_to);
            let _ = up_to.shutdown(Shutdown::Both);
        });
        let shared = self.clone();
        thread::spawn(move || {
            // An error is an end like any other.
            let _ = shared.answers(server, &client);
            let pair = shared
                .sockets
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .remove(&id);
            pair.iter()
                .flatten()
                .for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        });
        Ok(())
    }

    /// Passes answers on, with whatever fault there is.
    fn answers(&self, mut server: TcpStream, mut client: &TcpStream) -> io::Result<()> {
        let (mut buffer, mut sent) = (vec![0; 64 << 10], 0u64);
        loop {
            let count = server.read(&mut buffer)?;
            if count == 0 {
                return Ok(());
            }
            let mut at = 0;
            while at < count {
                let fault = *self.fault.lock().unwrap_or_else(PoisonError::into_inner);
                thread::sleep(fault.map_or(Duration::ZERO, Fault::pause));
                let effect = fault.map_or(Effect::Pass(count - at), |fault| fault.effect(sent, count - at));
                let pass = match effect {
                    Effect::Pass(pass) => pass,
                    Effect::Flip(pass, index) => {
                        buffer[at + index] ^= 1;
                        pass
                    }
                    Effect::End => return Ok(()),
                    Effect::Die => {
                        self.dead.store(true, Ordering::SeqCst);
                        self.cut();
                        return Ok(());
                    }
                    Effect::Stall => {
                        self.stall(client);
                        continue;
                    }
                };
                client.write_all(&buffer[at..at + pass])?;
                at += pass;
                sent += pass as u64;
                self.passed.fetch_add(pass as u64, Ordering::SeqCst);
            }
        }
    }

    /// Waits a little; the caller looks again. Ends with the proxy or the client, whose next write then fails.
    fn stall(&self, client: &TcpStream) {
        let fault = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.wake.wait_timeout(fault, Duration::from_millis(5)));
        if self.stop.load(Ordering::SeqCst) {
            let _ = client.shutdown(Shutdown::Both);
        }
    }

    fn cut(&self) {
        let sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets
            .values()
            .flatten()
            .for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_begins_at_its_byte() {
        let die = Fault::Die { after: 10 };
        assert_eq!(
            (die.effect(0, 4), die.effect(8, 4), die.effect(10, 4)),
            (Effect::Pass(4), Effect::Pass(2), Effect::Die)
        );
        assert_eq!(Fault::Truncate { after: 0 }.effect(0, 1), Effect::End);
        assert_eq!(Fault::Stall { after: 3 }.effect(3, 1), Effect::Stall);
        let corrupt = Fault::Corrupt { at: 10 };
        let got = (corrupt.effect(8, 2), corrupt.effect(8, 4), corrupt.effect(11, 4));
        assert_eq!(got, (Effect::Pass(2), Effect::Flip(4, 2), Effect::Pass(4)));
        assert_eq!(
            Fault::Delay {
                pause: Duration::from_millis(1)
            }
            .effect(5, 4),
            Effect::Pass(4)
        );
    }
}
