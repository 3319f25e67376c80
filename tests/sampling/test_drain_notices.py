"""Notices that replicas are to leave: a file and a URL, as an operator writes them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from megatron_rl.sampling import drain_notices
from megatron_rl.sampling.drain_notices import MOST_BYTES, DrainNotices, named_in


def test_a_line_is_a_name_and_remarks_are_left_out() -> None:
    assert named_in("0\n 10.0.0.7  # maintenance\n\n# 3\n") == {"0", "10.0.0.7"}


def test_the_file_counts_as_long_as_it_is_there(tmp_path: Path) -> None:
    """By a replica's number, by the address of one of its nodes, and by nothing else."""
    file = tmp_path / "drain"
    with DrainNotices(file, None, print) as notices:
        assert notices.read().of(1, {"10.0.0.7"}) == ""
        file.write_text("1\n")
        assert notices.read().of(1, {"10.0.0.7"}) == f"{file} names 1"
        assert notices.read().of(11, {"10.0.0.7"}) == ""
        file.write_text("10.0.0.7\n")
        assert notices.read().of(0, {"10.0.0.7", "10.0.0.8"}) == f"{file} names 10.0.0.7"
        assert notices.read().of(0, set()) == ""
        file.write_text("::FFFF:10.0.0.7\n2001:DB8:0::1\n")
        assert notices.read().of(0, {"10.0.0.7"}) == f"{file} names ::FFFF:10.0.0.7"
        assert notices.read().of(0, {"2001:db8::1"}) == f"{file} names 2001:DB8:0::1"
        file.unlink()
        assert notices.read().of(0, {"10.0.0.7"}) == ""


def test_a_file_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with DrainNotices(tmp_path, None, lines.append) as notices:
        assert notices.read().of(1, set()) == notices.read().of(2, set()) == ""
    assert lines == [f"{tmp_path} cannot be read, and counts as empty: Is a directory"]


@pytest.mark.parametrize("content", [None, b"1\n" * 50_000], ids=["a pipe", "100 kB"])
def test_a_file_that_is_none_or_too_long_holds_nobody_up(tmp_path: Path, content: bytes | None) -> None:
    """Read at every look of the loop that generates. A list that is cut would leave out names, or make others."""
    file, lines = tmp_path / "drain", list[str]()
    if content is None:
        os.mkfifo(file)
    else:
        file.write_bytes(content)
    with DrainNotices(file, None, lines.append) as notices:
        assert notices.read().of(1, set()) == notices.read().of(1, set()) == ""
        reason = "it is a pipe, and no file" if content is None else f"it has more than {MOST_BYTES} bytes"
        assert lines == [f"{file} cannot be read, and counts as empty: {reason}"]
        file.unlink()
        file.write_text("1\n")
        assert notices.read().of(1, set())


def test_lines_that_name_nobody_are_said_once(tmp_path: Path) -> None:
    file, lines = tmp_path / "drain", list[str]()
    with DrainNotices(file, None, lines.append) as notices:
        file.write_text("01\n1.0\n3\nfe80::1\n")
        assert notices.read().of(1, set()) == "" and notices.read().of(3, set()) == f"{file} names 3"
    assert len(lines) == 1 and f"{file} names '01', '1.0', which no replica or node is called" in lines[0]


class Answers(BaseHTTPRequestHandler):
    """Answers with the server's text, or with an error where that is None."""

    def do_GET(self) -> None:
        text = self.server.text
        self.send_response(200 if text is not None else 503)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_url_is_read_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not answer changes nothing, and is said once."""
    monkeypatch.setattr(drain_notices, "READ_S", 0.02)
    lines: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        server.text = "2"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/notices"
        with DrainNotices(tmp_path / "drain", url, lines.append) as notices:
            assert eventually(lambda: notices.read().of(2, set()) == f"{url} names 2")
            server.text = None
            assert eventually(lambda: len(lines) > 0)
            assert notices.read().of(2, set()) == f"{url} names 2"
            assert "503" in lines[0] and "drain_url" in lines[0]
            server.text = ""
            assert eventually(lambda: notices.read().of(2, set()) == "")
        server.shutdown()
        thread.join()
    assert len(lines) == 1


STRANGE = {
    "a TLS hello": b"\x16\x03\x01\x02\x00",
    "a bad status": b"HTTP/1.1 abc OK\r\n\r\n",
    "a long line": b"HTTP/1.1 200 " + b"x" * 70_000,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"".join(b"H%d: 1\r\n" % n for n in range(20_000)) + b"\r\n",
    "a broken chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n1\r\n",
    "a cut list": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n3\n",
    "a long list": b"HTTP/1.1 200 OK\r\n\r\n" + b"3\n" * MOST_BYTES,
    "a page": b"HTTP/1.1 200 OK\r\n\r\n<html>\n<p>please sign in</p>\n",
    "unchanged": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "a part": b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/9\r\nContent-Length: 2\r\n\r\n9\n",
    "itself": b"HTTP/1.1 302 Found\r\nLocation: /notices\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
    "nothing": b"",
}


class Drips(StreamRequestHandler):
    """Answers with the server's bytes; without an end where they end with an ellipsis."""

    def handle(self) -> None:
        self.request.recv(1 << 16)
        self.server.asked += 1
        with suppress(OSError):
            self.request.sendall(self.server.content)
            while self.server.drips:
                self.request.sendall(b"#")
                time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[ThreadingTCPServer]:
    with ThreadingTCPServer(("127.0.0.1", 0), Drips) as server:
        server.daemon_threads, server.asked, server.drips = True, 0, False
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.drips = False
        server.shutdown()
        thread.join()


def test_any_answer_of_a_server_costs_one_look(
    server: ThreadingTCPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each strange answer twice, then a list: the former counts until then, and one line says what is wrong."""
    monkeypatch.setattr(drain_notices, "READ_S", 0.15)
    lines, good = list[str](), b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n%d\n"
    url = f"http://me:secret@127.0.0.1:{server.server_address[1]}/notices?token=secret"
    with DrainNotices(tmp_path / "drain", url, lines.append) as notices:
        for number, (name, content) in enumerate((STRANGE | {"drips": good[:20]}).items(), start=1):
            server.content, server.drips = good % (number % 10), False
            assert eventually(lambda number=number: notices.read().of(number % 10, set()) != ""), name
            server.content, server.drips, asked = content, name == "drips", server.asked
            many = 3 * (11 if name == "itself" else 1)  # it is followed ten times
            assert eventually(lambda least=asked + many: server.asked >= least), name
            assert notices.read().of(number % 10, set()) != "" and len(lines) == number, (name, lines)
    assert not any("secret" in line for line in lines)
    assert all("drain_url=http://***@127.0.0.1" in line and "is asked again: " in line for line in lines)


def eventually(holds) -> bool:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
