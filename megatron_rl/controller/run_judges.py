"""The judges of a run: a judge's own ranks generate, or the policy does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from megatron_rl.checkpoint.model_folder import ModelFolder, ModelFolders
from megatron_rl.cluster.routing import chunk_sizes
from megatron_rl.config.judge_engine import judge_tp_size
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.controller.early_questions import EarlyQuestions
from megatron_rl.data.prompt_dataset import PromptDataset
from megatron_rl.dispatch import Future
from megatron_rl.errors import ConfigError
from megatron_rl.roles.judge import Judge
from megatron_rl.rollout.seeds import request_seed
from megatron_rl.rollout.slices import Drawn, Slice, SliceReport, Start
from megatron_rl.sampling.pool_sampler import PoolSampler
from megatron_rl.sampling.replica_sampler import ReplicaSampler
from megatron_rl.scoring.judge_forms import check_rubrics
from megatron_rl.scoring.judge_record import JudgeRecord
from megatron_rl.scoring.judging import Judging


class JudgeRanks(Protocol):
    """The call of a judge that the controller makes."""

    def judge(self, slices: dict[int, Slice]) -> Future[list[SliceReport]]: ...


class RanksOfJudge:
    """The ranks of a judge with a model of its own, of which each replica takes a share of the questions."""

    def __init__(self, judge: JudgeRanks, num_replicas: int) -> None:
        self._judge, self._num_replicas = judge, num_replicas

    def start(self, questions: Sequence[Start]) -> Callable[[], dict[int, Drawn]]:
        """Begin; the result waits for the replies."""
        return partial(replies_of, self.send(questions)) if questions else dict

    def send(self, questions: Sequence[Start]) -> Future[list[SliceReport]]:
        """Call the ranks; at least one question."""
        slices, first = {}, 0
        for replica, size in enumerate(chunk_sizes(len(questions), self._num_replicas)):
            if size:
                slices[replica] = Slice(0, None, tuple(questions[first : first + size]))
            first += size
        return self._judge.judge(slices)


def replies_of(reports: Future[list[SliceReport]]) -> dict[int, Drawn]:
    """Wait for the replies of all replicas."""
    return {request: drawn for report in reports.get() for request, drawn in report.drawn.items()}


class PolicyAsJudge:
    """The policy judges, with the weights that generation has. It is asked when its replies are waited for."""

    def __init__(self, sampler: PoolSampler | ReplicaSampler) -> None:
        self._sampler = sampler

    def start(self, questions: Sequence[Start]) -> Callable[[], dict[int, Drawn]]:
        """Return what asks, and waits."""
        return lambda: self._sampler.ask(questions) if questions else {}


@dataclass(frozen=True)
class RunJudges:
    """The judges of a run, and the record of their texts."""

    config: RunConfig
    judges: list[Judging]
    record: JudgeRecord

    @classmethod
    def of(
        cls,
        config: RunConfig,
        policy: ModelFolder,
        folders: ModelFolders,
        replay: Path | None,
        prompts: Mapping[str, PromptDataset],
    ) -> RunJudges:
        """Read what judges need before any process starts. replay: the run whose record is repeated. prompts: key of
        their files -> all prompts. Raises ConfigError as `Judging`, `JudgeRecord` and `check_rubrics`.
        """
        check_rubrics(config, prompts)
        repeats, seed = replay if config.judges else None, config.trainer.seed
        if repeats is None and any(settings.judge.recorded for settings in config.judges.values()):
            if config.trainer.rollouts_from is None:
                reason = "judge.recorded=true takes the verdicts of another run, and none is named"
                raise ConfigError(f"{reason}; try: trainer.rollouts_from=FOLDER, --replay FOLDER, or false")
            repeats = Path(config.trainer.rollouts_from)
        record = JudgeRecord(Path(config.trainer.default_local_dir), repeats, replay is not None)

        def seed_of(digest: int, attempt: int) -> int:
            return request_seed(seed, digest, 0, 0, attempt)

        judges = []
        for name, settings in config.judges.items():
            path = settings.model.path
            own = policy
            if path is not None and not settings.asks_policy:  # a judge that is not started is no role of the run
                own = folders.get(path) or ModelFolder(path, f"{name}.model.path")
            judges.append(Judging(name, settings, policy.tokenizer, own.tokenizer, record, seed_of))
        return cls(config, judges, record)

    def connect(self, placement: Placement, roles: Mapping[str, Judge], sampler: PoolSampler | ReplicaSampler) -> None:
        """Connect each judge with the ranks that generate for it."""
        for judge in self.judges:
            if judge.settings.judge.recorded:
                continue
            if judge.settings.asks_policy:
                judge.asker = PolicyAsJudge(sampler)
                # A question interrupts the recorded schedule of replicas, and so does its repetition.
                judge.is_asked_in_replays = isinstance(sampler, ReplicaSampler)
                continue
            spec = placement.roles[judge.name]
            pool = placement.pool_of(judge.name)
            ranks = RanksOfJudge(roles[judge.name], pool.world_size // judge_tp_size(self.config, spec))
            judge.asker = ranks
            if len(pool.roles) == 1:  # others share their ranks with roles that generate or train meanwhile
                judge.asker = judge.early = EarlyQuestions(ranks.send, judge.settings.judge.max_num_seqs)
