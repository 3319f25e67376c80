"""How example files are read: which columns, which tokens count in the loss, what becomes of long and of bad rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from annotated_types import Ge

from megatron_rl.config.constraints import OneOf
from megatron_rl.config.keys import fields_of
from megatron_rl.config.problems import refused
from megatron_rl.config.tasks import TaskDataConfig
from megatron_rl.errors import ConfigError

TRUNCATIONS = ("error", "left", "right", "drop")


@dataclass
class ReadingOptions(TaskDataConfig):
    """Keys under `data.` that sft, reward and dpo share. Pretraining examples have them under `ptx.`

    A column key that is None is found from the columns' names. A field of a struct is named with a dot:
    prompt_key="extra_info.question". messages_key: whole conversations. prompt_key with response_key: a question and
    its response. chosen_key, rejected_key: a preference. answers_key: several responses, the best first, or ordered by
    ranks_key (0 or 1 is the best, upwards) or scores_key (the higher, the better). margin_key: how much better the
    chosen response is than the rejected one; of several responses a list with how much each is better than the next
    one, or with a score for each, whose differences are taken.

    prompt_as_chat: None: a prompt that is text becomes a user's message of the template if the column of the response
    is not TRL's `completion`, and the tokenizer has a template. max_length: tokens of prompt and response. truncation:
    of longer rows: error: a bad row | left, right: cut that side off | drop: leave them out. bad_rows: error: refuse
    the files | skip: leave them out, and write their list to `bad_rows_file`. vocab_size: tokens that the model has;
    None: a row may hold any. end_token_ids: at which generation stops (`EndTokens`); (): at the
    tokenizer's. max_samples, seed: rows to use, and the seed by which they are chosen (`chosen_rows`).
    """

    prompt_key: str | None = None
    max_length: Annotated[int, Ge(2)] = 1024
    truncation: Annotated[str, OneOf(TRUNCATIONS)] = "error"
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    end_token_ids: Sequence[int] = ()
    max_samples: int = -1
    seed: int | None = None

    @classmethod
    def of(cls, keys: Any, **others: Any) -> ReadingOptions:
        """Take the options from a group of keys, a dataclass with some fields of the same names, and from `others`.

        Raises ConfigError.
        """
        names = {option.name for option in fields(cls)} & {key.name for key in fields(keys)}
        return cls(**{name: getattr(keys, name) for name in names} | others)

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that breaks a constraint of its field, with the nearest that keeps it."""
        group: type = type(self)
        constraints = fields_of(group)
        for option in fields(self):
            value, constraint = getattr(self, option.name), constraints[option.name]
            if value is not None and not constraint.holds(value):
                raise refused(constraint.violation(f"data.{option.name}", value, option.default, None))
        if self.bad_rows == "skip" and self.bad_rows_file is None:
            raise ConfigError("data.bad_rows=skip needs data.bad_rows_file, a path for the list of skipped rows")
