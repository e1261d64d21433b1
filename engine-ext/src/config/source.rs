//! [`Source`]: the texts of all settings with their origin, merged in the documented order, and how each kind is read.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use kvc_rdma::MoverKind;

use super::{
    Secret, Tls,
    error::{ConfigError, Origin},
    keys::{self, KEYS},
};

const CONFIG: &str = "config";
const PREFIX: &str = "KVC_";

/// Key → text and origin.
pub(super) struct Source(BTreeMap<&'static str, (String, Origin)>);

impl Source {
    pub(super) fn collect(
        flags: &[(String, String)],
        environment: impl IntoIterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let environment: BTreeMap<String, String> = environment
            .into_iter()
            .filter(|(name, _)| name.starts_with(PREFIX))
            .collect();
        let mut source = Self(BTreeMap::new());
        for key in KEYS {
            if let Some(default) = key.default {
                source.0.insert(key.name, (default.into(), Origin::Default));
            }
        }
        let flag = flags.iter().rev().find(|(name, _)| name == CONFIG);
        let file = match (flag, environment.get("KVC_CONFIG")) {
            (Some((name, path)), _) => Some((path, Origin::Flag(name.clone()))),
            (None, Some(path)) => Some((path, Origin::Environment("KVC_CONFIG".into()))),
            (None, None) => None,
        };
        if let Some((path, origin)) = file {
            source.read_file(path, origin)?;
        }
        for key in KEYS {
            let name = variable(key.name);
            if let Some(text) = environment.get(&name) {
                source.0.insert(key.name, (text.clone(), Origin::Environment(name)));
            }
        }
        for (name, text) in flags.iter().filter(|(name, _)| name != CONFIG) {
            let origin = Origin::Flag(name.clone());
            let key = known(&name.replace('-', "_"), &origin)?;
            source.0.insert(key, (text.clone(), origin));
        }
        Ok(source)
    }

    fn read_file(&mut self, path: &str, origin: Origin) -> Result<(), ConfigError> {
        let fault = |fault: String| ConfigError::File {
            field: CONFIG,
            origin: origin.clone(),
            path: path.into(),
            fault,
        };
        let text = fs::read_to_string(path).map_err(|e| fault(format!("{e}: give a readable TOML file")))?;
        self.read_text(path, &text, origin.clone())
    }

    pub(super) fn read_text(&mut self, path: &str, text: &str, origin: Origin) -> Result<(), ConfigError> {
        let fault = |fault: String| ConfigError::File {
            field: CONFIG,
            origin: origin.clone(),
            path: path.into(),
            fault,
        };
        let table = toml::Table::from_str(text).map_err(|e| fault(e.to_string().trim().replace('\n', " ")))?;
        let from = Origin::File(PathBuf::from(path));
        let mut flat = Vec::new();
        for (name, value) in table {
            match value {
                toml::Value::Table(inner) => flat.extend(inner.into_iter().map(|(k, v)| (format!("{name}.{k}"), v))),
                value => flat.push((name, value)),
            }
        }
        for (name, value) in flat {
            let key = known(&name, &from)?;
            let text = match value {
                toml::Value::String(text) => text,
                toml::Value::Integer(n) => n.to_string(),
                toml::Value::Float(x) => x.to_string(),
                toml::Value::Boolean(b) => b.to_string(),
                other => {
                    return Err(fault(format!(
                        "{name:?} is a {}: give a text, number or boolean",
                        other.type_str()
                    )));
                }
            };
            self.0.insert(key, (text, from.clone()));
        }
        Ok(())
    }

    fn text(&self, key: &'static str) -> Option<&(String, Origin)> {
        self.0.get(key)
    }

    fn parse<T>(
        &self,
        key: &'static str,
        limit: impl Into<String>,
        read: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let (text, origin) = match self.text(key) {
            Some((text, origin)) => (text.as_str(), origin.clone()),
            None => ("", Origin::Default),
        };
        read(text.trim()).ok_or_else(|| ConfigError::Value {
            field: key,
            origin,
            got: text.into(),
            limit: limit.into(),
        })
    }

    fn present(&self, key: &'static str) -> bool {
        self.text(key).is_some_and(|(text, _)| !text.trim().is_empty())
    }

    pub(super) fn address(&self, key: &'static str) -> Result<SocketAddr, ConfigError> {
        self.parse(key, "ip:port, like 127.0.0.1:0 or [::1]:7000", |t| t.parse().ok())
    }

    pub(super) fn optional_address(&self, key: &'static str) -> Result<Option<SocketAddr>, ConfigError> {
        if !self.present(key) {
            return Ok(None);
        }
        self.address(key).map(Some)
    }

    /// Names of movers in any order; given best first.
    pub(super) fn movers(&self, key: &'static str) -> Result<Vec<MoverKind>, ConfigError> {
        const BEST_FIRST: [MoverKind; 3] = [MoverKind::Verbs, MoverKind::Shm, MoverKind::Tcp];
        self.parse(
            key,
            "one or more of verbs, shm and tcp, with commas between them",
            |t| {
                let named: Option<Vec<_>> = t
                    .split(',')
                    .map(|name| BEST_FIRST.into_iter().find(|kind| kind.as_str() == name.trim()))
                    .collect();
                let named = named?;
                Some(BEST_FIRST.into_iter().filter(|kind| named.contains(kind)).collect())
            },
        )
    }

    /// Devices, each with its port if that is not the first.
    pub(super) fn devices(&self, key: &'static str) -> Result<Vec<String>, ConfigError> {
        if !self.present(key) {
            return Ok(Vec::new());
        }
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let device = |text: &str| {
            let (name, port) = text.trim().split_once(':').unwrap_or((text.trim(), "1"));
            let sound = !name.is_empty() && name.chars().all(plain) && port.parse::<u8>().is_ok_and(|port| port > 0);
            sound.then(|| text.trim().to_owned())
        };
        self.parse(key, "names of RDMA devices, like mlx5_0,mlx5_1:2", |t| {
            t.split(',').map(device).collect()
        })
    }

    pub(super) fn ip(&self, key: &'static str) -> Result<Option<IpAddr>, ConfigError> {
        if !self.present(key) {
            return Ok(None);
        }
        self.parse(key, "an IP address that others can reach, without port", |t| {
            t.parse().ok().filter(|ip: &IpAddr| !ip.is_unspecified())
        })
        .map(Some)
    }

    pub(super) fn number(&self, key: &'static str, min: u32, max: u32) -> Result<u32, ConfigError> {
        self.parse(key, format!("a whole number from {min} to {max}"), |t| {
            t.parse().ok().filter(|n| (min..=max).contains(n))
        })
    }

    pub(super) fn optional_number(&self, key: &'static str, min: u32, max: u32) -> Result<Option<u32>, ConfigError> {
        if !self.present(key) {
            return Ok(None);
        }
        self.number(key, min, max).map(Some)
    }

    pub(super) fn millis(&self, key: &'static str, min: u32, max: u32) -> Result<Duration, ConfigError> {
        let limit = format!("milliseconds from {min} to {max}");
        self.parse(key, limit, |t| t.parse().ok().filter(|n| (min..=max).contains(n)))
            .map(|ms| Duration::from_millis(u64::from(ms)))
    }

    pub(super) fn permille(&self, key: &'static str) -> Result<u32, ConfigError> {
        self.parse(key, "a share from 0.05 to 1, in steps of 0.001", |t| {
            let share: f64 = t.parse().ok()?;
            let permille = (share * 1000.0).round();
            ((share * 1000.0 - permille).abs() < 1e-6 && (50.0..=1000.0).contains(&permille)).then_some(permille as u32)
        })
    }

    pub(super) fn switch(&self, key: &'static str) -> Result<bool, ConfigError> {
        self.choice(key, &[("true", true), ("false", false)])
    }

    pub(super) fn choice<T: Copy>(&self, key: &'static str, all: &[(&str, T)]) -> Result<T, ConfigError> {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        self.parse(key, names.join(" or "), |t| {
            all.iter().find(|(name, _)| *name == t).map(|(_, v)| *v)
        })
    }

    pub(super) fn secret(&self, key: &'static str) -> Result<Option<Secret>, ConfigError> {
        let Some(bytes) = self.file(key)? else { return Ok(None) };
        let trimmed = bytes.trim_ascii();
        match Secret::new(trimmed) {
            Some(secret) => Ok(Some(secret)),
            None => Err(self.bad_file(
                key,
                format!(
                    "holds {} bytes: put {} random bytes or more there",
                    trimmed.len(),
                    Secret::MIN
                ),
            )),
        }
    }

    pub(super) fn tls(&self) -> Result<Option<Tls>, ConfigError> {
        let all = [keys::TLS_CERT, keys::TLS_KEY, keys::TLS_CA];
        let given = all.iter().filter(|key| self.present(key)).count();
        if given == 0 && !self.present(keys::TLS_NAME) {
            return Ok(None);
        }
        if let Some(missing) = all.iter().find(|key| !self.present(key)) {
            return Err(ConfigError::Conflict {
                field: missing,
                fact: "is missing while another tls key is set".into(),
                fix: "set tls.cert, tls.key and tls.ca together, or none",
            });
        }
        Ok(Some(Tls {
            cert: self.pem(keys::TLS_CERT)?,
            key: self.pem(keys::TLS_KEY)?,
            ca: self.pem(keys::TLS_CA)?,
            name: self
                .text(keys::TLS_NAME)
                .map(|(t, _)| t.trim().to_owned())
                .filter(|t| !t.is_empty()),
        }))
    }

    fn pem(&self, key: &'static str) -> Result<Arc<[u8]>, ConfigError> {
        let bytes = self.file(key)?.unwrap_or_default();
        if !bytes.windows(11).any(|w| w == b"-----BEGIN ") {
            return Err(self.bad_file(key, "holds no PEM block: give a PEM file".into()));
        }
        Ok(bytes.into())
    }

    fn file(&self, key: &'static str) -> Result<Option<Vec<u8>>, ConfigError> {
        if !self.present(key) {
            return Ok(None);
        }
        let path = self.text(key).map(|(t, _)| t.trim()).unwrap_or_default();
        fs::read(path)
            .map(Some)
            .map_err(|e| self.bad_file(key, format!("{e}: give a readable file")))
    }

    fn bad_file(&self, field: &'static str, fault: String) -> ConfigError {
        let (path, origin) = self.text(field).cloned().unwrap_or((String::new(), Origin::Default));
        ConfigError::File {
            field,
            origin,
            path,
            fault,
        }
    }
}

fn variable(key: &str) -> String {
    format!("{PREFIX}{}", key.replace('.', "_").to_uppercase())
}

fn known(name: &str, origin: &Origin) -> Result<&'static str, ConfigError> {
    KEYS.iter()
        .map(|key| key.name)
        .find(|key| *key == name || key.replace('.', "_") == name)
        .ok_or_else(|| ConfigError::Unknown {
            key: name.chars().take(64).flat_map(char::escape_debug).collect(),
            origin: origin.clone(),
            known: KEYS.iter().map(|key| key.name).collect::<Vec<_>>().join(", "),
        })
}
