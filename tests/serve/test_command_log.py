"""Each command runs once, in its model's order, however requests arrive; what a journal has of it; keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_rl.errors import ConfigError
from megatron_rl.serve import command_log
from megatron_rl.serve.bad_request import BadRequest
from megatron_rl.serve.command_log import MOST_WAITING, CommandLog, CommandReply, Entry
from megatron_rl.serve.request_journal import RequestJournal, records
from megatron_rl.serve.tenant_keys import key_digest, read_keys


def entry(tenant: str, lane: str, number: int, digest: str = "") -> Entry:
    return Entry(f"{tenant}:{lane}:{number}", tenant, lane, number, digest, command=number)


@given(st.permutations([(lane, number) for lane in "abc" for number in range(1, 7)] * 3), st.data())
def test_each_runs_once_in_its_order(arrivals: list[tuple[str, int]], data: st.DataObject) -> None:
    """Three models of two tenants, each command sent three times in any order, runs between them as they come.

    Would not catch two threads in the log at once, which its service excludes.
    """
    log, ran = CommandLog(), dict[str, list[int]]()
    for lane, number in arrivals:
        tenant = "x" if lane == "a" else "y"
        found, _ = log.submit(entry(tenant, lane, number))
        assert found.request_id == f"{tenant}:{lane}:{number}"
        for _ in range(data.draw(st.integers(0, 2))):
            if (due := log.next()) is not None:
                ran.setdefault(due.lane, []).append(due.number)
                log.finish(due, CommandReply(due.number))
    while (due := log.next()) is not None:
        ran.setdefault(due.lane, []).append(due.number)
        log.finish(due, CommandReply(due.number))
    assert ran == {lane: [1, 2, 3, 4, 5, 6] for lane in "abc"}
    assert log.find("y", "y:b:3").reply == CommandReply(3)


def test_tenants_take_turns() -> None:
    """One with a hundred commands keeps another waiting for one of them. Would not catch long commands of one."""
    log = CommandLog()
    for number in range(1, 101):
        log.submit(entry("many", "a", number))
    log.submit(entry("few", "b", 1))
    assert [log.next().tenant for _ in range(3)] == ["many", "few", "many"]


def test_other_commands_of_a_number_and_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would not catch two bodies with one digest."""
    log = CommandLog()
    log.submit(entry("x", "a", 1, "one"))
    with pytest.raises(BadRequest, match="another command; try: 2"):
        log.submit(entry("x", "a", 1, "two"))
    log.submit(entry("x", "a", 3))
    with pytest.raises(BadRequest, match="no command of this key"):
        log.find("y", "x:a:1")
    for number in range(MOST_WAITING - 2):
        log.submit(entry("x", "", number))
    with pytest.raises(BadRequest) as caught:
        log.submit(entry("x", "", MOST_WAITING))
    assert caught.value.status == 429
    log.submit(entry("y", "", 1))
    monkeypatch.setattr(command_log, "MOST_REPLIES", 2)
    for _ in range(4):
        due = log.next()
        log.finish(due, CommandReply(due.number))
    with pytest.raises(ValueError, match="twice"):
        log.finish(due, CommandReply())


def test_old_replies_leave_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the newest stay. Would not catch what else an old command keeps."""
    monkeypatch.setattr(command_log, "MOST_REPLIES", 2)
    log = CommandLog()
    for number in range(1, 5):
        log.submit(entry("x", "a", number))
        log.finish(log.next(), CommandReply(number))
    with pytest.raises(BadRequest) as caught:
        log.find("x", "x:a:2")
    assert caught.value.status == 410 and log.find("x", "x:a:3").reply == CommandReply(3)


def test_a_journal_that_is_cut_off_anywhere_has_its_whole_records(tmp_path: Path) -> None:
    """Cut at every byte, then continued. Would not catch a disk that loses what it has synchronised."""
    path, given_records = (
        tmp_path / "journal",
        [({"kind": "request"}, b"a\nb"), ({"kind": "reply"}, b""), ({"n": 3}, b"x" * 9)],
    )
    journal, ends = RequestJournal(path), []
    for head, content in given_records:
        journal.add(head, content)
        ends.append(path.stat().st_size)
    journal.close()
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        number = sum(end <= size for end in ends)
        assert [content for _, content in records(path)] == [content for _, content in given_records[:number]]
        journal = RequestJournal(path)
        journal.add({"kind": "more"}, b"more")
        journal.close()
        assert [content for _, content in records(path)][number:] == [b"more"]
    path.write_text("no journal\nat all\n")
    with pytest.raises(ConfigError, match="is no journal of a service"):
        list(records(path))


@pytest.mark.parametrize(
    ("text", "mode", "sentence"),
    [
        ("anna tml-0123456789abcdef\n", 0o644, "chmod 600"),
        ("", 0o600, "has no key"),
        ("anna\n", 0o600, "line 1: it must be `NAME KEY`"),
        ("../x tml-0123456789abcdef\n", 0o600, "letters and digits"),
        ("anna sk-0123456789abcdef\n", 0o600, "begins with tml-"),
        ("anna tml-short\n", 0o600, "at least 16"),
        ("anna tml-0123456789abcdef\nbert tml-0123456789abcdef\n", 0o600, "bert has the key of anna"),
    ],
)
def test_bad_files_of_keys(text: str, mode: int, sentence: str, tmp_path: Path) -> None:
    """Refused without a key in the message."""
    path = tmp_path / "keys"
    path.write_text(text)
    os.chmod(path, mode)
    with pytest.raises(ConfigError, match=sentence) as caught:
        read_keys(path)
    assert "0123456789abcdef" not in str(caught.value) and "short" not in str(caught.value)


def test_keys_are_read(tmp_path: Path) -> None:
    """A tenant may have several keys."""
    path = tmp_path / "keys"
    path.write_text("# ours\nanna tml-0123456789abcdef\n\nanna tml-abcdef0123456789\n")
    path.chmod(0o600)
    assert read_keys(path) == {key_digest(f"tml-{key}"): "anna" for key in ("0123456789abcdef", "abcdef0123456789")}
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none")
