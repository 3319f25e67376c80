"""The columns of a `records.Batch`: what each holds, who makes it and who reads it. No torch.

`megatron-rl columns` prints the table. A model role is sent the columns that it reads and no others (`read_by`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Shape = Literal["token", "sampled token", "row", "answer", "image", "image token", "patch"]
"""What a column has an element for. token: ragged [B, (L)], every token of a row. sampled token: ragged [B, (N)], the N
tokens of a row where the column `sampled` is True. row: [B]. answer: ragged [B, (n)], in a batch of responses that a
loss compares: a row has all responses to one prompt, each with the prompt before it, so that no split separates
them. image, image token, patch: ragged, every image of a row, every placeholder of its images, every patch of them."""

SCORING, ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE = "scoring", "actor.log_probs", "actor.update", "critic.update"
IMAGE_FEATURES = "actor.image_features"
"""The pass over images, before all others: rows without tokens."""
POLICY_FEATURES = "actor.policy_features"
"""The same by a tower that is trained."""
"""Passes of model roles. SCORING: every pass without gradients but the actor's own, which may replay experts."""
PASSES = (SCORING, ACTOR_SCORES, ACTOR_UPDATE, CRITIC_UPDATE)
LOG_PROBS_AT = "teacher.log_probs_at"
ESTIMATOR, KL, CORRECTION, METRICS = "every estimator", "KL in the reward", "rollout correction", "metrics"
ENTROPY, MASK = "choice of tokens by entropy", "mask of truncated responses"


@dataclass(frozen=True)
class Column:
    """One column. dtype: torch's, or `OBJECT` for a list of B Python values. maker: who fills it.

    readers: who reads it, passes of roles among them; estimators and losses name theirs where they are declared.
    """

    name: str
    shape: Shape
    dtype: str
    maker: str
    readers: tuple[str, ...]
    text: str

    @property
    def is_held(self) -> bool:
        """Whether ranks alone read it, so that it may stay on their nodes (`remote_columns`)."""
        return bool(self.readers) and set(self.readers) <= {*PASSES, LOG_PROBS_AT, IMAGE_FEATURES}


class ColumnTable(Mapping[str, Column]):
    """Declared columns by name. built_in: those of the package, without what a user's scorers declare."""

    def __init__(self, *columns: Column) -> None:
        self.built_in = columns
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
            raise ValueError(f"no column {name} is declared; did you mean: {', '.join(nearest)}")
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def read_by(self, *readers: str) -> tuple[str, ...]:
        """Names of the columns that these readers declare."""
        return tuple(column.name for column in self.values() if {*readers} & {*column.readers})


TOKEN: Shape = "token"
DRAWN: Shape = "sampled token"
ROW: Shape = "row"
ANSWER: Shape = "answer"
IMAGE: Shape = "image"
IMAGE_TOKEN: Shape = "image token"
PATCH: Shape = "patch"
F32, I64, OBJECT = "float32", "int64", "object"
PROMPT_COLUMNS = ("index", "sample", "uid", "data_source", "ground_truth", "extra_info", "raw_prompt", "images")
"""Columns that a row has of its prompt, in addition to tokens. The controller alone reads them: no rank gets them."""
ENGINE_OR_R2 = "rollout; actor.log_probs with router replay R2"
OLD = "actor.log_probs; actor.update where it is a step's only one; rollout with bypass_mode"
EXPERTS = "[B, (T), layers, K]: experts of the T <= L tokens that were read, in every layer that has experts"
NOT_READ_BEFORE = "what comes before it in its row is not read from here on; absent: a row is one conversation"
TOWER_ROWS = "[B, (placeholders), H * (1 + D)]: the tower's row for each, with its D rows for later layers"
TRAINED_ROWS = "the same rows by the actor's trained tower as it is in this step; absent: its tower is frozen"
MASKS = "rollout correction; mask of truncated responses"
TASKS = "records of reward and dpo"
TEACHER, STUDENT = "teacher", (ACTOR_UPDATE, LOG_PROBS_AT)
COMPARED = ("losses that compare responses",)

DATA, TASK = "data", ("rewards",)

COLUMNS = ColumnTable(
    Column("index", ROW, I64, DATA, (METRICS,), "the prompt's row over all files; seeds and sample tables name it"),
    Column("sample", ROW, I64, DATA, (METRICS,), "number of the row among the samples of its prompt"),
    Column("uid", ROW, I64, DATA, TASK, "equal for the samples of a prompt, failed episodes among them"),
    Column("data_source", ROW, OBJECT, DATA, (*TASK, "teachers"), "the prompt's data source, a str"),
    Column("ground_truth", ROW, OBJECT, DATA, TASK, "the expected answer, of any type"),
    Column("extra_info", ROW, OBJECT, DATA, TASK, "the prompt's own dict"),
    Column("raw_prompt", ROW, OBJECT, DATA, TASK, "the prompt as text or messages; absent: nothing reads text"),
    Column("images", ROW, OBJECT, DATA, ("rollout",), "an images.ImagePiece for each image; absent: rows are text"),
    Column("input_ids", TOKEN, I64, "rollout", (*PASSES, METRICS), "the tokens of a row, its prompt first"),
    Column(
        "sampled",
        TOKEN,
        "bool",
        "rollout",
        (*PASSES, METRICS),
        "the policy sampled this token; False for the first of a row",
    ),
    Column("conversation_starts", TOKEN, "bool", "rollout", (*PASSES, METRICS), NOT_READ_BEFORE),
    Column("routed_experts", TOKEN, "uint8 or int16", ENGINE_OR_R2, (ACTOR_SCORES, ACTOR_UPDATE), EXPERTS),
    Column("rollout_log_probs", DRAWN, F32, "rollout", (CORRECTION, METRICS), "the engine's log-prob of the token"),
    Column(
        "versions",
        DRAWN,
        I64,
        "rollout",
        (METRICS,),
        "training step of the weights that sampled the token; absent: the current weights",
    ),
    Column("image_pieces", IMAGE, I64, DATA, PASSES, "[B, (images), 4]: images.ImagePiece.numbers of each image"),
    Column("image_grids", IMAGE, I64, DATA, (*PASSES, IMAGE_FEATURES), "[B, (images), 3]: images.Grid of each image"),
    Column("image_features", IMAGE_TOKEN, "the model's", IMAGE_FEATURES, PASSES, TOWER_ROWS),
    Column("policy_features", IMAGE_TOKEN, "the model's", POLICY_FEATURES, (ACTOR_SCORES,), TRAINED_ROWS),
    Column("image_patches", PATCH, F32, DATA, (IMAGE_FEATURES, ACTOR_UPDATE), "[B, (patches), values]: the images'"),
    Column("groups", ROW, I64, "prompts", (), "equal for the responses to one prompt"),
    Column("truncated", ROW, "bool", "rollout", (MASK, METRICS), "the response was cut off before its end"),
    Column("environment_rewards", ROW, F32, "rollout", ("rewards",), "the sum of the rewards of an episode's turns"),
    Column("turn_rewards", DRAWN, F32, "rollout", ("rewards",), "the environment's, on the last token of each turn"),
    Column(
        "failed",
        ROW,
        "bool",
        "rollout",
        ("rewards", ESTIMATOR, METRICS),
        "the episode failed: no token of it is trained",
    ),
    Column("lost_peers", ROW, "bool", "prompts", (ESTIMATOR,), "all other episodes of its prompt failed"),
    Column("scores", ROW, F32, "rewards", (ESTIMATOR, METRICS), "the reward of the task"),
    Column("greedy_scores", ROW, F32, "rewards", (), "the reward of the greedy response to the prompt"),
    Column("components", ROW, F32, "rewards", (), "[B, K]: rewards that gdpo normalises separately"),
    Column("old_log_probs", DRAWN, F32, OLD, (ACTOR_UPDATE, KL, CORRECTION, METRICS), "log-prob before the updates"),
    Column("sum_pi_squared", DRAWN, F32, ACTOR_SCORES, (), "sum of squared probabilities of its distribution"),
    Column("entropy", DRAWN, F32, ACTOR_SCORES, (ENTROPY,), "entropy of the token's distribution"),
    Column("num_other_experts", ROW, I64, ACTOR_SCORES, (METRICS,), "recorded experts that routers would not choose"),
    Column("ref_log_probs", DRAWN, F32, "reference.log_probs", (ACTOR_UPDATE, KL), "log-prob under the reference"),
    Column("teachers", DRAWN, I64, "teachers", (ACTOR_UPDATE,), "index of the row's teacher"),
    Column("teacher_log_probs", DRAWN, F32, TEACHER, (ACTOR_UPDATE,), "log-prob under the teacher"),
    Column("teacher_top_ids", DRAWN, "int32", TEACHER, (ACTOR_UPDATE,), "[B, (N), k]: its likeliest tokens"),
    Column("teacher_top_log_probs", DRAWN, F32, TEACHER, (ACTOR_UPDATE,), "[B, (N), k]: their log-probs"),
    Column("student_top_ids", DRAWN, "int32", ACTOR_SCORES, STUDENT, "[B, (N), k]: the actor's likeliest tokens"),
    Column("teacher_log_probs_at", DRAWN, F32, TEACHER, (ACTOR_UPDATE,), "[B, (N), k]: those under the teacher"),
    Column("teacher_hidden", DRAWN, "the teacher's", TEACHER, (ACTOR_UPDATE,), "[B, (N), H]: before its head"),
    Column("old_values", DRAWN, F32, "critic.values", (CRITIC_UPDATE, METRICS), "the critic's value before the token"),
    Column("observations", DRAWN, I64, "estimator", (), "equal where turns have read the same since the turn before"),
    Column("rewards", DRAWN, F32, KL, (ESTIMATOR, METRICS), "-KL penalty; the score on a row's last one"),
    Column("totals", ROW, F32, KL, (ESTIMATOR, METRICS), "the score minus the row's KL penalties"),
    Column("advantages", DRAWN, F32, "estimator", (ACTOR_UPDATE, METRICS), "advantage of the token"),
    Column("returns", DRAWN, F32, "estimator", (CRITIC_UPDATE, METRICS), "target of the critic's value"),
    Column("rollout_weights", DRAWN, F32, CORRECTION, (ACTOR_UPDATE, ESTIMATOR), "importance weight of the token"),
    Column("kept", DRAWN, F32, MASKS, (ACTOR_UPDATE, CRITIC_UPDATE), "1 where it counts in losses, else 0; absent: 1"),
    Column("trained", DRAWN, F32, ENTROPY, (ACTOR_UPDATE,), "1 where the policy loss trains it, else 0"),
    Column("answer_images", ANSWER, I64, TASKS, COMPARED, "images of each response; absent: none has any"),
    Column("answer_lengths", ANSWER, I64, TASKS, COMPARED, "tokens of each response and its prompt"),
    Column(
        "answer_scores",
        ANSWER,
        F32,
        "reward.scores; dpo.answer_log_probs",
        COMPARED,
        "score or log-prob of each response",
    ),
    Column("given", ANSWER, F32, TASKS, (), "margins, targets, or log-probs under the reference"),
    Column("labels", ANSWER, F32, TASKS, (), "kto: 1 for a desirable response, else 0"),
    Column("weights", ROW, F32, TASKS, COMPARED, "1; 0 where a row fills up a split"),
)
