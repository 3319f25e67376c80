"""Notices that replicas are to leave: a file and a URL, as an operator writes them."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from megatron_rl.sampling import drain_notices
from megatron_rl.sampling.drain_notices import DrainNotices, named_in


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
        file.unlink()
        assert notices.read().of(0, {"10.0.0.7"}) == ""


def test_a_file_that_cannot_be_read_is_said_once(tmp_path: Path) -> None:
    lines: list[str] = []
    with DrainNotices(tmp_path, None, lines.append) as notices:
        assert notices.read().of(1, set()) == notices.read().of(2, set()) == ""
    assert lines == [f"{tmp_path} cannot be read, and counts as empty: Is a directory"]


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


def eventually(holds) -> bool:
    deadline = time.monotonic() + 60
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
