"""A small HTTP client: JSON answers, server-sent events, and disconnects on purpose. Every call has a deadline."""

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Answer:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpError(Exception):
    """An answer that the caller did not want."""

    def __init__(self, answer: Answer, what: str):
        super().__init__(f"{what}: HTTP {answer.status}: {answer.text[:500]}")
        self.answer = answer


@dataclass
class Client:
    """Calls one server; each call has its own connection."""

    port: int
    timeout_s: float = 120
    headers: dict[str, str] = field(default_factory=dict)

    def open(self, method: str, path: str, body=None, headers=None, timeout_s=None) -> http.client.HTTPConnection:
        """Sends a request; the caller reads `getresponse()` and closes. `body`: bytes as they are, else JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s or self.timeout_s)
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = {"content-type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**kind, **self.headers, **(headers or {})})
        return connection

    def call(self, method: str, path: str, body=None, headers=None, timeout_s=None) -> Answer:
        """The answer, whatever its status."""
        begin = time.monotonic()
        connection = self.open(method, path, body, headers, timeout_s)
        try:
            response = connection.getresponse()
            data = response.read()
            names = {k.lower(): v for k, v in response.getheaders()}
            return Answer(response.status, names, data, time.monotonic() - begin)
        finally:
            connection.close()

    def get(self, path: str, **kw) -> Answer:
        return self.call("GET", path, **kw)

    def post(self, path: str, body=None, **kw) -> Answer:
        """The answer; HttpError unless its status is 2xx."""
        answer = self.call("POST", path, {} if body is None else body, **kw)
        if answer.status // 100 != 2:
            raise HttpError(answer, f"POST {path}")
        return answer

    def stream(self, path: str, body, headers=None, timeout_s=None) -> "Stream":
        return Stream(self.open("POST", path, body, headers, timeout_s))


class Stream:
    """A streamed answer: iterate for its events; `close` early to go away as a client does."""

    def __init__(self, connection: http.client.HTTPConnection):
        self.connection = connection
        self.begin = time.monotonic()
        self.first_s: float | None = None
        self.response = connection.getresponse()
        self.status = self.response.status
        self.headers = {k.lower(): v for k, v in self.response.getheaders()}

    def __iter__(self) -> Iterator[dict]:
        if self.status // 100 != 2:
            raise HttpError(Answer(self.status, self.headers, self.response.read(), 0), "stream")
        for line in self.response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            if self.first_s is None:
                self.first_s = time.monotonic() - self.begin
            yield json.loads(data)

    def close(self) -> None:
        self.response.close()
        self.connection.close()
