"""Train on the samples that another run has recorded; only validation generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_rl.columns import COLUMNS, PROMPT_COLUMNS
from megatron_rl.errors import ConfigError
from megatron_rl.images import pieces_of_numbers
from megatron_rl.observe.sample_files import GREEDY, RecordedStep, num_recorded, read_step, recorded_files
from megatron_rl.records import Batch, one_per_group, prompts_of, ragged_from_lengths
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.rollout import Rollout
from megatron_rl.sampling.image_features import pieces_of
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.sampler import Schedule, Sources
from megatron_rl.scoring.sampled_batch import SampledBatch

KEY = "trainer.rollouts_from"


class RecordedSampler(PoolSampler):
    """The batches of a recorded run. Rewards are computed again, by the functions and models of this run.

    Raises ConfigError where the record does not have a step or has only some of its samples, or where a batch does not
    fit the configuration or the prompt files.
    """

    def __init__(self, schedule: Schedule, sources: Sources, rollout: Rollout, sender: Actor | None = None) -> None:
        run = sources.config.trainer.rollouts_from
        if run is None:
            raise ValueError(f"{KEY} is null")
        self._run, self._files = Path(run), recorded_files(Path(run))
        super().__init__(schedule, sources, rollout, sender)

    def next(self, step: int) -> SampledBatch:
        """The recorded batch of a step."""
        recorded = read_step(self._files[step])
        self._check(recorded)
        self.cursor.next_indices()  # the position in the prompts, which a checkpoint has, moves as in any run
        rows, greedy = rows_of_record(recorded), None
        if self.needs_greedy:
            greedy = rows_of_record(recorded, GREEDY)
        if not self.config.returns_experts:
            rows = rows.without("routed_experts")
        rows.add(self._prompts(recorded, rows))
        self._read_images(pieces_of(rows))
        rows = self._with_images(rows)
        if greedy is not None:
            greedy.add(one_per_group(rows.select(*PROMPT_COLUMNS)))
        return SampledBatch(step, rows, greedy)

    def add_prompts(self, last: int) -> None:
        """Add none: the record has them."""

    def _prompts(self, recorded: RecordedStep, rows: Batch) -> Batch:
        """The columns of prompts of the recorded rows, with what the prompt files have for the reward function."""
        details = recorded.rows
        numbers = [row["index"] for row in details]
        places = self.train_data.places(numbers)
        if None in places:
            rule = f"prompt {numbers[places.index(None)]}, which is none of data.train_files"
            raise ConfigError(f"{KEY}={self._run}: step {recorded.step} has {rule}; try: the files of the recorded run")
        prompts = self.train_data.batch([place for place in places if place is not None])
        if not self.config.has_turns:
            same = zip(prompts_of(rows)["input_ids"].unbind(), prompts["input_ids"].unbind(), strict=True)
            other = next((number for number, (a, b) in enumerate(same) if not torch.equal(a, b)), None)
            if other is not None:
                where = f"step {recorded.step}, sample {other}, has another prompt than data.train_files"
                raise ConfigError(
                    f"{KEY}={self._run}: {where}; try: the files, chat template and length limits of the recorded run"
                )
        elif "raw_prompt" in prompts:
            prompts.add(raw_prompt=[row["prompt"] for row in details])
        if self.config.has_turns and "images" in prompts:
            prompts.add(images=[pieces_of_numbers(row.get("image_pieces", ())) for row in details])
        uid = torch.from_numpy(recorded.columns["groups"].copy())
        prompts.add(uid=uid, sample=torch.tensor([row["sample"] for row in details]))
        return prompts.without("input_ids")

    def _check(self, recorded: RecordedStep) -> None:
        sizes = recorded.lengths["input_ids"]
        if not recorded.is_whole:
            rule = f"has {len(recorded.rows)} of the {recorded.num_rows} samples of step {recorded.step}"
            raise ConfigError(f"{KEY}={self._run} {rule}; try: record a run with trainer.recorded_prompts=-1")
        if sizes.max(initial=0) > self.config.longest_sequence:
            rule = f"has a sample of {sizes.max()} tokens in step {recorded.step}; the limit is"
            raise ConfigError(
                f"{KEY}={self._run} {rule} {self.config.longest_sequence}; "
                "try: data.max_prompt_length and data.max_response_length of the recorded run"
            )
        if self.needs_greedy and f"{GREEDY}input_ids" not in recorded.columns:
            rule = f"has no greedy responses in step {recorded.step}, which algorithm.adv_estimator needs"
            raise ConfigError(f"{KEY}={self._run} {rule}; try: algorithm.adv_estimator=rloo")


def check_record(run: Path, first: int, last: int, num_samples: int) -> None:
    """Raise ConfigError where a step from `first` to `last` has no record, or one of another number of samples."""
    files = recorded_files(run)
    for step in range(first, last + 1):
        if step in files and (number := num_recorded(files[step])) != num_samples:
            rule = f"has {number} samples of step {step}, and this run takes {num_samples}"
            raise ConfigError(
                f"{KEY}={run} {rule}; try: its batch size and rollout.n, and trainer.recorded_prompts=-1 in it"
            )
    absent = next((step for step in range(first, last + 1) if step not in files), None)
    if absent is None:
        return
    if not files:
        rule = "has no recorded samples; try: a run with trainer.recorded_prompts=-1"
    else:
        whole = next((step - 1 for step in range(1, absent + 1) if step not in files), 0)
        rule = f"has no samples of step {absent}; try: trainer.total_training_steps={whole}"
    raise ConfigError(f"{KEY}={run} {rule}")


def rows_of_record(recorded: RecordedStep, prefix: str = "") -> Batch:
    """Return the columns that generation makes; scorers, the estimator and corrections make the others again."""
    made: dict[str, Any] = {}
    for name, values in recorded.columns.items():
        own = name.removeprefix(prefix)
        if not name.startswith(prefix) or own not in COLUMNS or COLUMNS[own].maker.split(";")[0] != "rollout":
            continue
        tensor = torch.from_numpy(values.copy())
        sizes = recorded.lengths.get(name)
        made[own] = tensor if sizes is None else ragged_from_lengths(tensor, torch.from_numpy(sizes.copy()))
    return Batch(**made)
