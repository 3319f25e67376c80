"""What judges have written, one line for each question, so that a replay asks none."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

from megatron_rl.errors import ConfigError, RewardError
from megatron_rl.observe.appended_file import AppendedFile
from megatron_rl.records import Sampling

FILE = "judgements.jsonl"


class Written(NamedTuple):
    """What a judge has written: tokens, and the engine's log-prob of each."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def key_of(judge: str, token_ids: tuple[int, ...], sampling: Sampling, seed: int) -> str:
    """Return the digest of a question and of how its reply is sampled."""
    how = (judge, sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, seed)
    return hashlib.sha256(repr(how).encode() + array("q", token_ids).tobytes()).hexdigest()[:32]


class JudgeRecord:
    """The record of a run, which grows, and the record that it repeats.

    A question that was asked several times has its replies in the order of the calls: the policy as its own judge may
    change its mind.
    """

    def __init__(self, folder: Path, repeats: Path | None, is_replay: bool = True) -> None:
        """repeats: the folder of the run whose record is repeated; None: judges are asked. is_replay: all judges are
        repeated. Raises ConfigError where the folder has no record.
        """
        self._path, self._num_lines = folder / FILE, 0
        self._file: AppendedFile | None = None
        self._repeats, self.is_replay = repeats, repeats is not None and is_replay
        self._known: dict[str, deque[Written]] = defaultdict(deque)
        if repeats is not None:
            self._read(repeats / FILE)

    def add(self, judge: str, key: str, written: Written, text: str) -> None:
        """Append a reply. Raises OSError."""
        line = {"judge": judge, "key": key, "text": text, "tokens": written.token_ids, "log_probs": written.log_probs}
        if self._file is None:
            self._open()
        assert self._file is not None
        self._file.append(json.dumps(line).encode() + b"\n")
        self._num_lines += 1

    def take(self, judge: str, key: str) -> Written:
        """Return the recorded reply to a question. Raises RewardError for an unknown question."""
        replies = self._known.get(key)
        if not replies:
            raise RewardError(
                f"{self._repeats}/{FILE} has no verdict of {judge} on a response of this run: it records other "
                "samples, prompts or keys of the judge; for held-out responses alone, try: trainer.test_freq=0 and "
                "trainer.val_before_train=false"
            )
        return replies.popleft() if len(replies) > 1 else replies[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the record; JSON-ready."""
        return {"judgements": self._num_lines} if self._num_lines else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue a record where `state_dict` was taken."""
        self._num_lines = int(state.get("judgements", 0))

    def _open(self) -> None:
        """Open the file with the lines that this run continues. The run's folder is its own from its first step on."""
        kept = b""
        if self._path.is_file() and self._num_lines:
            lines = self._path.read_bytes().splitlines(keepends=True)
            kept = b"".join(lines[: self._num_lines])
        self._path.unlink(missing_ok=True)
        self._file = AppendedFile(self._path)
        if kept:
            self._file.append(kept)

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; a run with judges writes it") from error
        try:
            for line in lines:
                entry = json.loads(line)
                self._known[entry["key"]].append(Written(tuple(entry["tokens"]), tuple(entry["log_probs"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged: {error}") from error
