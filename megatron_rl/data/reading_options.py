"""How files are read: which columns, what counts in the loss, what becomes of long and of bad rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.problems import nearest_name
from megatron_rl.config.tasks import BAD_ROWS, LOSS_ON
from megatron_rl.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "drop")
CHOICES = {"loss_on": LOSS_ON, "truncation": TRUNCATIONS, "bad_rows": BAD_ROWS}


@dataclass(frozen=True)
class ColumnKeys:
    """Keys under `data.` that name columns; one that is None is found from the columns' names. A field of a struct is
    named with a dot: prompt_key="extra_info.question".

    messages_key: whole conversations. prompt_key with response_key: a question and its answer. text_key: plain text.
    chosen_key, rejected_key: a preference. answers_key with ranks_key (0 or 1 is the best, upwards) or scores_key (the
    higher, the better), or the best first: several answers. label_key: desirable or not. score_key: one answer's score.
    margin_key: how much better the chosen answer is than the rejected one; of several answers a list with how much each
    is better than the next one, or with a score for each, whose differences are taken.
    tools_key: the tools of a conversation, for the template.
    """

    messages_key: str | None = None
    prompt_key: str | None = None
    response_key: str | None = None
    text_key: str | None = None
    chosen_key: str | None = None
    rejected_key: str | None = None
    answers_key: str | None = None
    ranks_key: str | None = None
    scores_key: str | None = None
    label_key: str | None = None
    score_key: str | None = None
    margin_key: str | None = None
    tools_key: str | None = None


@dataclass(frozen=True)
class ReadingOptions(ColumnKeys):
    """The keys under `data.` that the stages share.

    prompt_as_chat: whether a prompt that is text becomes a user's message of the template; None: if the column of the
    answer is not TRL's `completion`, and the tokenizer has a template. append_eos: end an answer with the end token
    where nothing else ends it. loss_on: answers: every turn of the assistant | last: the last answer | all: the prompt,
    too. max_length: tokens of prompt and answer. truncation: of longer rows: error: a bad row | left, right: cut that
    side off | drop: leave them out. bad_rows: error: refuse the files | skip: leave them out, and write their list to
    `bad_rows_file`. vocab_size: tokens that the model has; None: a row may hold any.
    """

    prompt_as_chat: bool | None = None
    append_eos: bool = True
    loss_on: str = "answers"
    max_length: int = 1024
    truncation: str = "error"
    bad_rows: str = "error"
    bad_rows_file: str | None = None
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that has no meaning, with the nearest that has one."""
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                nearest = nearest_name(str(value), choices)
                raise ConfigError(f"data.{name}={value} must be one of {', '.join(choices)}; nearest: {nearest}")
        if self.max_length < 2:
            raise ConfigError(f"data.max_length={self.max_length} must be at least 2 tokens; nearest: 2")
        if self.bad_rows == "skip" and self.bad_rows_file is None:
            raise ConfigError("data.bad_rows=skip needs data.bad_rows_file, a path for the list of what was skipped")
