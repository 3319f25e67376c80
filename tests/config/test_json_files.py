"""JSON files that others wrote: plain values, or one sentence."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_rl.config.json_files import DEEPEST, UnreadableFileError, read_json, read_json_object


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "settings.json is not valid JSON: Expecting value"),
        (b"\xff{", "settings.json is not valid JSON: 'utf-8' codec"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "it is more than 100 levels deep"),
        (b'{"a":' * 100_000, "it is more than 100 levels deep"),
        (b'{"lora_alpha": 1' + b"0" * 400 + b"}", "a number has 401 digits, and at most 300 are read"),
        (b'["\\ud83d"]', "'utf-8' codec can't encode"),
        (b'{"\\uDC00": 1}', "'utf-8' codec can't encode"),
        (b"[1, 2]", "settings.json is not an object in braces"),
        (b'{"a": "' + b"x" * 1000 + b'"}', "settings.json has 1009 bytes, and at most 900 are read"),
    ],
)
def test_strange_json_is_one_sentence(tmp_path: Path, content: bytes, reason: str) -> None:
    """Without the bounds these are tracebacks of whoever walks, adds or prints the values. Would not catch an object
    whose values have wrong types."""
    file = tmp_path / "settings.json"
    file.write_bytes(content)
    with pytest.raises(UnreadableFileError) as raised:
        read_json_object(file, largest=900 if b"xxx" in content else 1 << 20)
    assert str(raised.value).startswith("settings.json ") and reason in str(raised.value)


def test_values_within_the_bounds_are_read(tmp_path: Path) -> None:
    """The deepest nesting, the largest number, and a whole pair of surrogates, by hand."""
    file = tmp_path / "settings.json"
    file.write_text("[" * DEEPEST + "]" * DEEPEST)
    assert str(read_json(file)).count("[") == DEEPEST
    file.write_text('{"n": ' + "9" * 300 + ', "smile": "\\ud83d\\ude00"}')
    assert read_json(file) == {"n": 10**300 - 1, "smile": "\N{GRINNING FACE}"}


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would wait for a writer for ever."""
    os.mkfifo(tmp_path / "pipe.json")
    for name, kind in (("pipe.json", "it is a pipe"), ("none.json", "it does not exist"), (".", "it is a folder")):
        with pytest.raises(UnreadableFileError, match=kind):
            read_json(tmp_path / name)
