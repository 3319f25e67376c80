"""The examples of sft, reward or dpo: files read and tokenised once, visited in a seeded order that resumes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import as_list
from megatron_rl.config.task_config import TaskConfig
from megatron_rl.config.tasks import DPO, REWARD, SFT
from megatron_rl.data.example_reader import ReadingReport
from megatron_rl.data.prompt_images import PromptImages
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.reading import (
    Example,
    Labelled,
    Ranking,
    ScoredExample,
    read_examples,
    read_labelled,
    read_rankings,
    read_scored,
)
from megatron_rl.data.reading_options import ReadingOptions
from megatron_rl.errors import ConfigError
from megatron_rl.experience.block_layout import round_up
from megatron_rl.parallel.zigzag import segment_multiple
from megatron_rl.tasks.training_records import mismatched

TRAIN, VAL = "train", "val"
UNSET_PROMPT_KEY = "prompt"
"""The default of `data.prompt_key`, which tasks without generation read as null."""

ReadFiles = tuple[list[Any], ReadingReport]
Reader = Callable[[Sequence[str], PreTrainedTokenizerBase, ReadingOptions, PromptImages | None], ReadFiles]


def reader_of(config: TaskConfig) -> Reader:
    """The function that reads the files of a task."""
    alone: dict[str, Reader] = {SFT: read_examples, REWARD: read_scored, DPO: read_labelled}
    return alone[config.trainer.stage] if config.loss_traits.alone else read_rankings


def reading_options(
    config: TaskConfig, kind: str, vocab_size: int | None, end_token_ids: Sequence[int]
) -> ReadingOptions:
    """The keys of `data`. kind: train or val; each has a list of bad rows of its own. vocab_size: tokens that the model
    has, if known. end_token_ids: at which generation stops. Raises ConfigError.
    """
    data = config.data
    others: dict[str, Any] = {"vocab_size": vocab_size, "end_token_ids": end_token_ids}
    others["max_samples"] = data.train_max_samples if kind == TRAIN else data.val_max_samples
    others["seed"] = data.seed if data.shuffle else None
    if data.prompt_key == UNSET_PROMPT_KEY:
        others["prompt_key"] = None
    if data.bad_rows == "skip":
        listed = Path(data.bad_rows_file or Path(config.trainer.default_local_dir) / "bad_rows.jsonl")
        others["bad_rows_file"] = str(listed if kind == "train" else listed.with_stem(f"{listed.stem}_{kind}"))
    return ReadingOptions.of(data, **others)


def read_files(
    config: TaskConfig, folder: ModelFolder, images: PromptImages | None = None
) -> tuple[ReadFiles, ReadFiles]:
    """The records to train on and those held out, each with a report. images: reads those of rows. Raises
    ConfigError.
    """
    data, read = config.data, reader_of(config)
    vocab_size, ends = folder.settings["vocab_size"], folder.end_tokens.ids
    train, val = (
        read(as_list(files), folder.tokenizer, reading_options(config, kind, vocab_size, ends), images)
        for kind, files in ((TRAIN, data.train_files), (VAL, data.val_files))
    )
    return train, val


class TaskData:
    """train, val: the records. mismatched: for kto both sets with responses to other prompts, else {}. notes:
    lines to print about them. Raises ConfigError.
    """

    def __init__(self, config: TaskConfig, files: tuple[ReadFiles, ReadFiles]) -> None:
        data = config.data
        self.max_length = data.max_length or 0
        (self.train, report), (self.val, val_report) = files
        self.notes = [*report.lines(), *(f"held out: {line}" for line in val_report.lines())]
        self.cursor = MixtureCursor(
            report.prompt_files(), data.train_file_weights, data.train_batch_size, data.shuffle, data.seed
        )
        check_lengths(config, [*self.train, *self.val])
        self.mismatched: dict[str, list[Labelled]] = {}
        if config.trainer.stage == DPO and "kto" in config.dpo.loss:
            sets = {TRAIN: self.train, VAL: self.val}
            self.mismatched = {name: mismatched(records, self.max_length) for name, records in sets.items()}

    def next(self) -> list[Any]:
        """The next batch."""
        return [self.train[index] for index in self.cursor.next_indices()]

    def state_dict(self) -> dict[str, Any]:
        """Position in the order of examples; JSON-ready."""
        return {"cursor": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises ConfigError when examples or their order differ."""
        self.cursor.load_state_dict(state["cursor"])


def check_lengths(config: TaskConfig, records: Sequence[Example | Ranking | Labelled | ScoredExample]) -> None:
    """Raise ConfigError if responses that share a micro-batch have more tokens than a micro-batch may have.

    Under context parallelism each is filled up to equal chunks.
    """
    role = Placement.of(config).leader
    if role.update is None or role.update.max_tokens is None:
        return
    ranks, extra = role.megatron.context_parallel_size, config.trainer.stage == REWARD
    multiple = segment_multiple(ranks)
    limit = round_up(role.update.max_tokens * ranks, multiple)
    for record in records:
        answers = [record] if isinstance(record, Example) else _answers(record)
        tokens = sum(round_up(len(answer.tokens) + extra, multiple) for answer in answers)
        if tokens > limit:
            needed = -(-tokens // ranks)
            raise ConfigError(
                f"{record.where}: {len(answers)} response(s) of {tokens} tokens share a micro-batch, and "
                f"{role.update.key}={role.update.max_tokens} is less; try: {role.update.key}={needed}"
            )


def _answers(record: Ranking | Labelled | ScoredExample) -> Sequence[Example]:
    return record.answers if isinstance(record, Ranking) else (record.example,)
