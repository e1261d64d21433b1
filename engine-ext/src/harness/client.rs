//! [`Client`]: one keep-alive HTTP connection, blocking, for tests and benches.

use std::{
    io::{self, BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use serde::Serialize;
use serde_json::Value;

/// See the module.
#[derive(Debug)]
pub struct Client {
    stream: BufReader<TcpStream>,
    line: String,
}

impl Client {
    /// Connects.
    ///
    /// # Errors
    /// The system's.
    pub fn connect(address: SocketAddr) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(60)))?;
        Ok(Self {
            stream: BufReader::new(stream),
            line: String::new(),
        })
    }

    /// `GET`: status and JSON body, or the text as a JSON string.
    ///
    /// # Errors
    /// The connection's.
    pub fn get(&mut self, path: &str) -> io::Result<(u16, Value)> {
        self.send("GET", path, b"")
    }

    /// `POST` with a JSON body.
    ///
    /// # Errors
    /// The connection's.
    pub fn post(&mut self, path: &str, body: &impl Serialize) -> io::Result<(u16, Value)> {
        self.send("POST", path, &serde_json::to_vec(body)?)
    }

    /// Any method with any body.
    ///
    /// # Errors
    /// The connection's.
    pub fn send(&mut self, method: &str, path: &str, body: &[u8]) -> io::Result<(u16, Value)> {
        let mut request = format!(
            "{method} {path} HTTP/1.1\r\nhost: kvc\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.stream.get_mut().write_all(&request)?;
        let (status, body) = self.answer()?;
        let value = serde_json::from_slice(&body)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&body).into_owned()));
        Ok((status, value))
    }

    /// One prepared request, its answer thrown away: for benches.
    ///
    /// # Errors
    /// The connection's.
    pub fn raw(&mut self, request: &[u8]) -> io::Result<u16> {
        self.stream.get_mut().write_all(request)?;
        self.answer().map(|(status, _)| status)
    }

    fn answer(&mut self) -> io::Result<(u16, Vec<u8>)> {
        let status = self.read_line()?.split(' ').nth(1).and_then(|s| s.parse().ok());
        let status = status.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))?;
        let mut length = 0;
        loop {
            let line = self.read_line()?;
            if line.is_empty() {
                break;
            }
            if let Some((name, value)) = line.split_once(':')
                && name.eq_ignore_ascii_case("content-length")
            {
                length = value
                    .trim()
                    .parse()
                    .map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
            }
        }
        let mut body = vec![0; length];
        self.stream.read_exact(&mut body)?;
        Ok((status, body))
    }

    fn read_line(&mut self) -> io::Result<&str> {
        self.line.clear();
        if self.stream.read_line(&mut self.line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(self.line.trim_end())
    }
}
