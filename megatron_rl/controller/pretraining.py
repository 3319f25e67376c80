"""Examples whose cross-entropy joins the actor's loss: read once, visited in a seeded order that resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.pretraining import PretrainingConfig
from megatron_rl.config.roles import pretraining_length
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.data.examples import Example, token_batch
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.reading import read_examples
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.dispatch import Beside
from megatron_rl.errors import ConfigError
from megatron_rl.ledger.planner.foreign_models import model_facts
from megatron_rl.records import TokenBatch

SHARED = {field.name for field in fields(ReadingOptions)} & {field.name for field in fields(PretrainingConfig)}
"""Keys that are under `ptx` here and under `data` in the stages that own the readers."""
OTHER_NAMES = {"train_files": "files", "train_file_weights": "file_weights"}


class Pretraining:
    """One batch for each optimizer step of the actor; none where `ptx.coef` is 0. notes: what there is to say of the
    files. Raises ConfigError as `data.reading.read_examples`, with the keys that are meant here.
    """

    def __init__(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.notes: list[str] = []
        self._examples: list[Example] = []
        self._cursor: MixtureCursor | None = None
        keys, data = config.ptx, config.data
        if not keys.coef:
            return
        with named_here():
            self._examples, report = read_examples(as_list(keys.files), tokenizer, pretraining_options(config))
            self._cursor = MixtureCursor(
                report.prompt_files(), keys.file_weights, keys.mini_batch_size, data.shuffle, data.seed
            )
        self.notes = [f"pretraining: {renamed(line)}" for line in report.lines()]

    def next(self) -> Beside[TokenBatch] | None:
        """The next batch, which is shared out beside the samples."""
        if self._cursor is None:
            return None
        return Beside(token_batch([self._examples[index] for index in self._cursor.next_indices()]))

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, and of what; JSON-ready."""
        return {} if self._cursor is None else {"pretraining": self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken; from the beginning where there were no examples then. Raises ConfigError
        when they or their order are others."""
        if self._cursor is not None and "pretraining" in state:
            with named_here():
                self._cursor.load_state_dict(state["pretraining"])


def pretraining_options(config: RunConfig) -> ReadingOptions:
    """How the files are read. Raises ConfigError."""
    found: dict[str, Any] = {name: getattr(config.ptx, name) for name in SHARED}
    found["max_length"] = pretraining_length(config)
    found["apply_chat_template_kwargs"] = config.data.apply_chat_template_kwargs
    if config.ptx.bad_rows == "skip" and config.ptx.bad_rows_file is None:
        found["bad_rows_file"] = str(Path(config.trainer.default_local_dir) / "bad_pretraining_rows.jsonl")
    found["vocab_size"] = model_facts(config.actor_rollout_ref.model.path).get("vocab_size")
    return ReadingOptions(**found)


@contextmanager
def named_here() -> Iterator[None]:
    """Round what reads files: its errors name the keys that are meant."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(renamed(str(error))) from error


def renamed(text: str) -> str:
    """A reader's sentence, which speaks of keys under `data`, with those under `ptx`."""
    names = "|".join(sorted({*SHARED, *OTHER_NAMES}, key=len, reverse=True))
    return re.sub(rf"\bdata\.({names})\b", lambda found: f"ptx.{OTHER_NAMES.get(found[1], found[1])}", text)
