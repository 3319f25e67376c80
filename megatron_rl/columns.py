"""The columns of a `records.Batch`: what each holds, who makes it and who reads it. No torch.

`megatron-rl columns` prints the table. A model role is sent the columns that it reads and no others (`read_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Shape = Literal["token", "sampled token", "row"]
"""What a column has an element for. token: ragged [B, (L)], every token of a row. sampled token: ragged [B, (N)], the N
tokens of a row where the column `sampled` is True. row: [B]."""

SCORING, ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE = "scoring", "actor.log_probs", "actor.update", "critic.update"
"""Passes of model roles. SCORING: every pass without gradients but the actor's own, which may replay experts."""
PASSES = (SCORING, ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE)
ESTIMATOR, KL, CORRECTION, METRICS = "every estimator", "KL in the reward", "rollout correction", "metrics"


@dataclass(frozen=True)
class Column:
    """One column. dtype: torch's. maker: who fills it.

    readers: who reads it, passes of roles among them; further estimators name their columns where they are declared.
    """

    name: str
    shape: Shape
    dtype: str
    maker: str
    readers: tuple[str, ...]
    text: str


class ColumnTable(Mapping[str, Column]):
    """Declared columns by name."""

    def __init__(self, columns: tuple[Column, ...] = ()) -> None:
        self._by_name: dict[str, Column] = {}
        for column in columns:
            self.declare(column)

    def declare(self, column: Column) -> Column:
        """Add a column, such as one that a user's scorer makes. Raises ValueError for a name that another has."""
        if self._by_name.setdefault(column.name, column) != column:
            raise ValueError(f"a column {column.name} is declared already: {self[column.name].text}")
        return column

    def __getitem__(self, name: str) -> Column:
        if name not in self._by_name:
            nearest = get_close_matches(name, self._by_name, n=1, cutoff=0.0)
            raise ValueError(f"no column {name} is declared; nearest: {', '.join(nearest)}")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def read_by(self, reader: str) -> tuple[str, ...]:
        """Names of the columns that a reader declares."""
        return tuple(column.name for column in self.values() if reader in column.readers)


COLUMNS = ColumnTable(
    (
        Column("input_ids", "token", "int64", "rollout", (*PASSES, METRICS), "the tokens of a row, its prompt first"),
        Column("sampled", "token", "bool", "rollout", PASSES, "True where the policy drew the token; never the first"),
        Column(
            "routed_experts",
            "token",
            "uint8 or int16",
            "rollout; actor.log_probs with router replay R2",
            (ACTOR_SCORES, ACTOR_UPDATE),
            "[B, (T), layers, K]: the K experts, in every layer that has experts, of the first T <= L tokens of a row",
        ),
        Column(
            "rollout_log_probs",
            "sampled token",
            "float32",
            "rollout",
            (CORRECTION, METRICS),
            "the engine's log-prob of the token",
        ),
        Column(
            "versions",
            "sampled token",
            "int64",
            "rollout",
            (METRICS,),
            "the weights that drew the token, in training steps; absent: all are the newest",
        ),
        Column("groups", "row", "int64", "prompts", (), "equal for the answers to one prompt"),
        Column("truncated", "row", "bool", "rollout", (METRICS,), "the answer was cut off before its end"),
        Column("scores", "row", "float32", "rewards", (ESTIMATOR, METRICS), "the reward of the task"),
        Column("greedy_scores", "row", "float32", "rewards", (), "of the greedy answer to the row's prompt"),
        Column(
            "components",
            "row",
            "float32",
            "rewards",
            (),
            "[B, K]: values of the reward function that are normalised separately",
        ),
        Column(
            "old_log_probs",
            "sampled token",
            "float32",
            "actor.log_probs; actor.update where it is the only one of a step; rollout with bypass_mode",
            (ACTOR_UPDATE, KL, CORRECTION, METRICS),
            "log-prob under the policy before the step's updates",
        ),
        Column(
            "sum_pi_squared",
            "sampled token",
            "float32",
            "actor.log_probs",
            (),
            "sum of squared probabilities of the token's distribution",
        ),
        Column(
            "entropy",
            "sampled token",
            "float32",
            "actor.log_probs",
            ("choice of tokens by entropy",),
            "entropy of the token's distribution",
        ),
        Column(
            "num_other_experts",
            "row",
            "int64",
            "actor.log_probs",
            (METRICS,),
            "recorded experts of the row that the trainer's routers would not have chosen",
        ),
        Column(
            "ref_log_probs",
            "sampled token",
            "float32",
            "reference.log_probs",
            (ACTOR_UPDATE, KL),
            "log-prob under the reference",
        ),
        Column(
            "old_values",
            "sampled token",
            "float32",
            "critic.values",
            (CRITIC_UPDATE, METRICS),
            "the critic's value before the token",
        ),
        Column(
            "rewards",
            "sampled token",
            "float32",
            "KL in the reward",
            (ESTIMATOR, METRICS),
            "the score on the last sampled token of a row, minus the KL penalty of each token",
        ),
        Column("advantages", "sampled token", "float32", "estimator", (ACTOR_UPDATE, METRICS), "of the token"),
        Column("returns", "sampled token", "float32", "estimator", (CRITIC_UPDATE, METRICS), "what the critic learns"),
        Column(
            "rollout_weights",
            "sampled token",
            "float32",
            "rollout correction",
            (ACTOR_UPDATE, ESTIMATOR),
            "importance weight of the token",
        ),
        Column(
            "kept",
            "sampled token",
            "float32",
            "rollout correction; mask of truncated answers; files of examples",
            (ACTOR_UPDATE, CRITIC_UPDATE),
            "1 where the token counts in losses, else 0; absent: all count",
        ),
        Column(
            "trained",
            "sampled token",
            "float32",
            "choice of tokens by entropy",
            (ACTOR_UPDATE,),
            "1 where the policy loss trains the token, else 0; KL and denominators have all that count",
        ),
    )
)
