"""Examples whose cross-entropy joins the actor's loss: read once, visited in a seeded order that resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import pretraining_length
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.config.tasks import PretrainingConfig
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.reading import Example, read_examples, token_batch
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.dispatch import ExtraBatch
from megatron_rl.errors import ConfigError
from megatron_rl.records import Batch

SHARED = {field.name for field in fields(ReadingOptions)} & {field.name for field in fields(PretrainingConfig)}
"""Keys of `ptx` that the tasks have under `data`."""
OTHER_NAMES = {"train_files": "files", "train_file_weights": "file_weights"}


class Pretraining:
    """A batch of examples for each optimizer step of the actor; none if `ptx.coef` is 0. notes: sentences about files.

    Raises ConfigError as `data.reading.read_examples`, with the keys of `ptx`.
    """

    def __init__(self, config: RunConfig, folder: ModelFolder) -> None:
        """Read the examples, unless `ptx.coef` is 0. folder: the one of the policy."""
        self.notes: list[str] = []
        self._examples: list[Example] = []
        self._cursor: MixtureCursor | None = None
        keys, data = config.ptx, config.data
        if not keys.coef:
            return
        with errors_of_ptx():
            options = pretraining_options(config, folder)
            self._examples, report = read_examples(as_list(keys.files), folder.tokenizer, options)
            self._cursor = MixtureCursor(
                report.prompt_files(), keys.file_weights, keys.mini_batch_size, data.shuffle, data.seed
            )
        self.notes = [f"pretraining: {in_ptx(line)}" for line in report.lines()]

    def next(self) -> ExtraBatch[Batch] | None:
        """The next batch, of which every data-parallel rank gets its share in addition to the samples."""
        if self._cursor is None:
            return None
        return ExtraBatch(token_batch([self._examples[index] for index in self._cursor.next_indices()]))

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands, and of which examples; JSON-ready."""
        return {} if self._cursor is None else {"pretraining": self._cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken; a checkpoint without examples starts at the beginning.

        Raises ConfigError when examples or their order differ.
        """
        if self._cursor is not None and "pretraining" in state:
            with errors_of_ptx():
                self._cursor.load_state_dict(state["pretraining"])


def pretraining_options(config: RunConfig, folder: ModelFolder) -> ReadingOptions:
    """How the files are read. Raises ConfigError."""
    keys, others = config.ptx, dict[str, Any]()
    if keys.bad_rows == "skip" and keys.bad_rows_file is None:
        others["bad_rows_file"] = str(Path(config.trainer.default_local_dir) / "bad_pretraining_rows.jsonl")
    return ReadingOptions.of(
        keys,
        max_length=pretraining_length(config),
        apply_chat_template_kwargs=config.data.apply_chat_template_kwargs,
        vocab_size=folder.settings["vocab_size"],
        end_token_ids=folder.end_tokens.ids,
        **others,
    )


@contextmanager
def errors_of_ptx() -> Iterator[None]:
    """Let errors of the body name keys of `ptx`."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(in_ptx(str(error))) from error


def in_ptx(text: str) -> str:
    """Replace keys of `data` in a reader's sentence by those of `ptx`."""
    names = "|".join(sorted({*SHARED, *OTHER_NAMES}, key=len, reverse=True))
    return re.sub(rf"\bdata\.({names})\b", lambda key: f"ptx.{OTHER_NAMES.get(key[1], key[1])}", text)
