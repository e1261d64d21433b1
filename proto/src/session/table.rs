//! All sessions, by key (an index that lives as long as the record) and by name.

use std::{
    collections::{BTreeMap, HashMap},
    ops::{Bound, Index, IndexMut},
};

use crate::{id::SessionId, time::Now};

use super::Session;

/// A session's place in [`Sessions`]; given out again after the record is forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(u32);

/// The sessions.
#[derive(Clone, Debug, Default)]
pub struct Sessions {
    records: Vec<Option<Box<Session>>>,
    free: Vec<Key>,
    by_id: HashMap<SessionId, Key>,
    /// The same in the order of names, for listings: a look-up there would touch a dozen names in memory.
    listed: BTreeMap<SessionId, Key>,
}

impl Sessions {
    /// Sessions known.
    pub fn len(&self) -> usize {
        self.by_id.len()
    }

    /// None known.
    pub fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }

    /// The key of a name.
    pub fn find(&self, id: &SessionId) -> Option<Key> {
        self.by_id.get(id).copied()
    }

    /// The record of a name.
    pub fn by_id(&self, id: &SessionId) -> Option<&Session> {
        self.get(self.find(id)?)
    }

    /// The key of a name; a new record if it has none.
    pub fn find_or_insert(&mut self, id: &SessionId, now: Now) -> Key {
        if let Some(key) = self.find(id) {
            return key;
        }
        let record = Some(Box::new(Session::new(id.clone(), now)));
        let key = match self.free.pop() {
            Some(key) => {
                self.records[key.0 as usize] = record;
                key
            }
            None => {
                self.records.push(record);
                Key(u32::try_from(self.records.len() - 1).expect("fewer than 2^32 sessions fit into memory"))
            }
        };
        self.by_id.insert(id.clone(), key);
        self.listed.insert(id.clone(), key);
        key
    }

    /// The record, if the key is live.
    pub fn get(&self, key: Key) -> Option<&Session> {
        self.records.get(key.0 as usize)?.as_deref()
    }

    /// The record, if the key is live.
    pub fn get_mut(&mut self, key: Key) -> Option<&mut Session> {
        self.records.get_mut(key.0 as usize)?.as_deref_mut()
    }

    /// Forgets a record.
    pub fn remove(&mut self, key: Key) {
        if let Some(session) = self.records.get_mut(key.0 as usize).and_then(Option::take) {
            self.by_id.remove(&session.id);
            self.listed.remove(&session.id);
            self.free.push(key);
        }
    }

    /// Records in the order of their names, after one.
    pub fn after(&self, id: Option<&SessionId>) -> impl Iterator<Item = &Session> {
        let from = id.map_or(Bound::Unbounded, Bound::Excluded);
        self.listed
            .range::<SessionId, _>((from, Bound::Unbounded))
            .filter_map(|(_, key)| self.get(*key))
    }

    /// Keys of all records.
    pub fn keys(&self) -> Vec<Key> {
        self.listed.values().copied().collect()
    }
}

impl Index<Key> for Sessions {
    type Output = Session;
    /// A key is held only while its record lives; a dead one is a fault of this crate.
    fn index(&self, key: Key) -> &Session {
        self.get(key).expect("live session key")
    }
}

impl IndexMut<Key> for Sessions {
    fn index_mut(&mut self, key: Key) -> &mut Session {
        self.get_mut(key).expect("live session key")
    }
}
