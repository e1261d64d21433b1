//! A client of raw sockets: what it sends and gets is seen byte for byte.

use std::{collections::HashMap, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("text")
    }
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
    /// The code of an error answer.
    pub fn code(&self) -> String {
        let json: serde_json::Value = serde_json::from_slice(&self.body).expect("an error answer is JSON");
        assert!(
            json["error"]["message"].as_str().is_some_and(|m| !m.is_empty()),
            "{json}"
        );
        json["error"]["code"].as_str().expect("a code").to_owned()
    }
}

pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let mut text = format!(
        "{method} {path} HTTP/1.1\r\nhost: router\r\ncontent-length: {}\r\n",
        body.len()
    );
    for (name, value) in headers {
        text.push_str(&format!("{name}: {value}\r\n"));
    }
    let mut bytes = (text + "\r\n").into_bytes();
    bytes.extend_from_slice(body);
    bytes
}

pub async fn connect(to: SocketAddr) -> TcpStream {
    TcpStream::connect(to).await.expect("the router listens")
}

/// Sends and waits for the whole answer.
pub async fn call(to: SocketAddr, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Reply {
    let mut stream = connect(to).await;
    stream
        .write_all(&request(method, path, headers, body))
        .await
        .expect("sends");
    read_reply(&mut stream, &mut Vec::new()).await.expect("an answer")
}

pub async fn post(to: SocketAddr, path: &str, session: Option<&str>, body: &str) -> Reply {
    let headers: Vec<_> = session.map(|s| ("X-Session-Id", s)).into_iter().collect();
    call(to, "POST", path, &headers, body.as_bytes()).await
}

pub async fn read_reply(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Reply> {
    let (first, headers, body) = read_message(stream, buffer).await?;
    let status = first.split(' ').nth(1)?.parse().ok()?;
    Some(Reply { status, headers, body })
}

/// First line, headers (lower case), body. What follows stays in `buffer`. None when the connection ends before.
pub async fn read_message(
    stream: &mut TcpStream,
    buffer: &mut Vec<u8>,
) -> Option<(String, HashMap<String, String>, Vec<u8>)> {
    let end = loop {
        if let Some(at) = find(buffer, b"\r\n\r\n") {
            break at;
        }
        more(stream, buffer).await?;
    };
    let head = String::from_utf8_lossy(&buffer[..end]).into_owned();
    buffer.drain(..end + 4);
    let mut lines = head.split("\r\n");
    let first = lines.next()?.to_owned();
    let headers: HashMap<String, String> = lines
        .filter_map(|l| l.split_once(':'))
        .map(|(n, v)| (n.to_ascii_lowercase(), v.trim().to_owned()))
        .collect();
    let mut body = Vec::new();
    if headers.get("transfer-encoding").is_some_and(|v| v == "chunked") {
        loop {
            let at = loop {
                if let Some(at) = find(buffer, b"\r\n") {
                    break at;
                }
                more(stream, buffer).await?;
            };
            let size = usize::from_str_radix(std::str::from_utf8(&buffer[..at]).ok()?, 16).ok()?;
            buffer.drain(..at + 2);
            while buffer.len() < size + 2 {
                more(stream, buffer).await?;
            }
            body.extend(buffer.drain(..size));
            buffer.drain(..2);
            if size == 0 {
                break;
            }
        }
    } else {
        let size = headers
            .get("content-length")
            .map_or(0, |v| v.parse().expect("a length"));
        while buffer.len() < size {
            more(stream, buffer).await?;
        }
        body.extend(buffer.drain(..size));
    }
    Some((first, headers, body))
}

pub async fn more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    let mut bytes = [0; 16 << 10];
    let read = timeout(Duration::from_secs(30), stream.read(&mut bytes))
        .await
        .expect("within 30 s");
    match read {
        Ok(n) if n > 0 => {
            buffer.extend_from_slice(&bytes[..n]);
            Some(())
        }
        _ => None,
    }
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|w| w == what)
}
