"""Teachers as one scorer: each is asked about the rows of its own prompts, and their columns are put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.columns import COLUMNS, SCORING
from megatron_rl.config.problems import nearest_name, raise_problems
from megatron_rl.config.roles import RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.dispatch import Future
from megatron_rl.errors import Violation
from megatron_rl.losses.rows import spread
from megatron_rl.records import Batch, Stored, as_held, first_true, ragged, ragged_from_lengths
from megatron_rl.remote_columns import RemoteColumn, RemoteSegment
from megatron_rl.scoring.sampled_batch import SampledBatch

OtherPrompts = Mapping[str, Mapping[int, torch.Tensor]]
"""Teacher -> number of a prompt in the dataset -> the tokens that the teacher reads in its place."""


def check_teachers(config: RunConfig, sources: Collection[str]) -> None:
    """Raise ConfigError for a data source without a teacher, and for a teacher without a data source.

    sources: of all training prompts.
    """
    teachers = [role for role in roles_of(config) if role.kind.teaches]
    keyed = {role.settings.key: role for role in teachers if role.settings.key is not None}
    if not keyed:
        return
    column, problems = f"column {config.data.reward_fn_key}", []
    for source, role in keyed.items():
        if source not in sources:
            rule = f"must be in {column} of a training prompt; there are {', '.join(sorted(sources))}"
            key = f"{role.key}.key"
            problems.append(
                Violation({key: source}, rule, {key: nearest_name(source, sorted(sources))}, wrong_name=True)
            )
    if alone := sorted(set(sources) - keyed.keys()):
        settings = {f"{role.key}.key": source for source, role in keyed.items()}
        rule = f"leave prompts with {', '.join(alone)} in {column} without a teacher"
        hint = f"add distillation.teacher_models.NAME with key={alone[0]}, or leave the prompts out"
        problems.append(Violation(settings, rule, hint=hint))
    raise_problems("this run cannot start", problems)


def other_prompts(config: RunConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptDataset) -> OtherPrompts:
    """Tokenise the prompts that teachers read in place of the policy's. Raises ConfigError for a missing one, for one
    that cannot be tokenised, and for one that is too long.
    """
    read = {}
    for role in roles_of(config):
        keys = role.settings
        if role.reads_own_prompts:
            key = (f"{role.key}.prompt_key", keys.prompt_key)
            most = (f"{role.key}.max_prompt_length", keys.max_prompt_length)
            sources = None if keys.key is None else {keys.key}
            read[role.name] = prompts.prompts_at(key, most, tokenizer, config.data, sources)
    return read


@dataclass(frozen=True)
class TeacherCall:
    """A teacher and its method on the ranks."""

    spec: RoleSpec
    method: Callable[[Batch], Future[Batch]]


class TeacherScorer:
    """The columns that the configured loss reads of teachers, and `teachers`: who taught each row.

    It must start before the actor's pass, and is then taken after it, because a teacher may be asked about tokens that
    the pass gives.
    """

    def __init__(self, calls: Sequence[TeacherCall], asks: Sequence[str], prompts: OtherPrompts) -> None:
        """asks: columns beyond those of every scoring pass that teachers read; with any, they start in `take`."""
        self._calls, self._asks, self._prompts = calls, tuple(asks), prompts

    def start(self, batch: SampledBatch) -> None:
        self._batch = batch
        sources = batch.rows.objects("data_source")
        keys = [call.spec.settings.key for call in self._calls]
        taught = [[row for row, source in enumerate(sources) if key in (None, source)] for key in keys]
        self._rows = [torch.tensor(rows, dtype=torch.int64) for rows in taught]  # a teacher may have none in a step
        self._pending = [] if self._asks else self._asked()

    def _asked(self) -> list[Future[Batch] | None]:
        """Ask every teacher that has rows."""
        read = (*COLUMNS.read_by(SCORING), *self._asks)
        pending: list[Future[Batch] | None] = []
        for call, rows in zip(self._calls, self._rows, strict=True):
            asked = self._batch.rows.select(*read)[rows] if len(rows) else None
            if asked is not None and call.spec.name in self._prompts:
                indices = self._batch.rows["index"][rows].tolist()
                asked = with_prompts(asked, [self._prompts[call.spec.name][index] for index in indices])
            pending.append(None if asked is None else call.method(asked))
        return pending

    def take(self) -> Batch:
        pending = self._asked() if self._asks else self._pending
        answers = [None if future is None else future.get() for future in pending]
        rows, num_sampled = self._batch.rows, self._batch.rows.num_sampled
        number = torch.zeros(len(rows), dtype=torch.int64)
        for teacher, mine in enumerate(self._rows):
            number[mine] = teacher
        columns = joined_rows(answers, self._rows, num_sampled)
        return Batch(teachers=rows.per_sampled_token(spread(number, num_sampled)), **columns)


def joined_rows(
    answers: Sequence[Batch | None], rows: Sequence[torch.Tensor], num_sampled: torch.Tensor
) -> dict[str, Stored]:
    """Put columns of some rows each together: name -> ragged [rows, (sampled tokens), ...], held if one of them is.

    rows: int64, the numbers of each batch's rows; each of `num_sampled` has one batch. Where columns have another
    width, such as hidden states of different models, the narrower are filled up with 0 on the right.
    """
    given = [(answer, mine) for answer, mine in zip(answers, rows, strict=True) if answer is not None]
    order = torch.cat([mine for _, mine in given]).argsort()
    whole: dict[str, Stored] = {}
    for name in given[0][0].names:
        parts = [as_held(answer.stored(name)) for answer, _ in given]
        column = RemoteColumn.joined(parts).rows(order)
        is_held = any(isinstance(part, RemoteSegment) for part in column.parts)
        whole[name] = column if is_held else ragged_from_lengths(column.values(), num_sampled)
    return whole


def with_prompts(batch: Batch, prompts: Sequence[torch.Tensor]) -> Batch:
    """Return the rows with other prompts (token ids) before what was sampled and observed since."""
    before = first_true(batch["sampled"]).tolist()
    ids, sampled = [], []
    for row, mask, first, prompt in zip(
        batch["input_ids"].unbind(), batch["sampled"].unbind(), before, prompts, strict=True
    ):
        ids.append(torch.cat([prompt, row[first:]]))
        sampled.append(torch.cat([torch.zeros(len(prompt), dtype=torch.bool), mask[first:]]))
    columns = batch.without("input_ids", "sampled")
    changed = Batch(input_ids=ragged(ids), sampled=ragged(sampled))
    changed.add(columns)
    return changed
