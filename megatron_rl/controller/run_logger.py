"""The logger of a run: lines on the console, metrics, tables, and numbers of the summary."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.urls import without_secrets
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.written_pictures import WrittenPictures
from megatron_rl.dispatch import Future
from megatron_rl.errors import StorageError
from megatron_rl.hybrid_engine.hybrid_engine import TransitionReport
from megatron_rl.observe.batch_metrics import length_metrics, score_metrics, throughput_metrics
from megatron_rl.observe.loggers import MetricLogger
from megatron_rl.observe.memory_ledger import memory_metrics
from megatron_rl.observe.phase_clock import TIMELINE_FILE, PhaseClock, write_calls
from megatron_rl.observe.phase_watch import PhaseWatch
from megatron_rl.observe.progress import RunProgress
from megatron_rl.observe.sample_files import drop_later
from megatron_rl.observe.services import Services
from megatron_rl.observe.step_line import TimeLeft, step_line
from megatron_rl.observe.summary import write_sample_table
from megatron_rl.observe.terminal import Announcer, Terminal
from megatron_rl.observe.updates import SkippedUpdates, update_means
from megatron_rl.records import Batch, first_true, prompts_of
from megatron_rl.roles.host import RankHost
from megatron_rl.scoring.scored_answers import ScoredAnswers


class RunLogger(Announcer):
    """Console, metrics and tables of one run; a context manager around loggers and progress bar.

    accuracies, val_rewards: one number for every validation so far. reshardings: cost of the last resharding for each
    rollout rank. next_metrics: added to those of the next step. lacks_validation: the validation after the last step
    was skipped, because the run was to stop. images: writes the pictures of tables; None: samples are text.
    """

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        tokenizer: PreTrainedTokenizerBase,
        planned_memory: dict[str, dict[str, dict[str, int]]],
    ) -> None:
        self.config, self.folder, self.tokenizer = config, folder, tokenizer
        super().__init__(Terminal())
        # A terminal shows the phase all the time, in the progress bar.
        self.watch = PhaseWatch(None if self.console.is_terminal else self.say, config.trainer.num_steps)
        self.progress = RunProgress(config.trainer.num_steps, self.console, self.watch.progress)
        self.clock = PhaseClock(self._show_phase)
        self.time_left = TimeLeft(config.trainer.num_steps)
        self.updates = SkippedUpdates(config.trainer.max_skipped_updates)
        self.accuracies: list[float] = []
        self.val_rewards: list[float] = []
        self.lacks_validation = False
        self.transitions: Sequence[TransitionReport] = []
        self.next_metrics: dict[str, float] = {}
        self.images: WrittenPictures | None = None
        self._planned_memory = planned_memory
        self._num_ranks = Placement.of(config).world_size
        self._open = contextlib.ExitStack()
        self._services = Services({})

    def __enter__(self) -> RunLogger:
        """Raises StorageError when the run's folder cannot be written to, ConfigError when a port is taken."""
        trainer = self.config.trainer
        drop_later(self.folder.path, self.folder.resumed_step or 0)
        place = (self.folder.path, self.console, self.folder.resumed_step)
        metric_logger = MetricLogger(trainer.logger, *place, self._step_line)
        self.metric_logger = self._open.enter_context(metric_logger)
        settings = without_secrets(dataclasses.asdict(self.config))
        names = (trainer.project_name, trainer.experiment_name)
        self._services = Services.start(trainer.logger, *names, settings, self.folder.path, trainer.prometheus.port)
        if self._services.exporter is not None:
            self.say(f"metrics for Prometheus: http://127.0.0.1:{self._services.exporter.port}/metrics")
        self._open.enter_context(self.progress)
        self._open.enter_context(self.watch)
        return self

    def __exit__(self, *failure: object) -> None:
        self._warn_of(self._services.close())
        self._open.close()

    def _warn_of(self, sentences: list[str]) -> None:
        for sentence in sentences:
            self.warn(sentence)

    def keep_folder(self) -> None:
        """Make the run's folder again if it was deleted, and warn. Raises as `RunFolder.keep`."""
        if self.folder.keep():
            self.warn(
                f"{self.folder.path} was deleted or emptied during the run; it was made again, without the "
                "checkpoints and tables that were in it"
            )

    def _show_phase(self, name: str) -> None:
        self.progress.phase(name)
        self.watch.phases(self.clock.open_phases)

    def begin_step(self, step: int) -> None:
        """A step begins: forget the seconds of what was before."""
        self.watch.step = step
        self.time_left.begin_step()
        self.clock.begin_step()

    def _step_line(self, metrics: Mapping[str, float], step: int) -> str:
        return step_line(metrics, step, self.config.trainer.num_steps, self.time_left.after(step))

    def state_dict(self) -> dict[str, Any]:
        """The logger's state in a checkpoint; JSON-ready."""
        return {
            "accuracies": list(self.accuracies),
            "val_rewards": list(self.val_rewards),
            "lacks_validation": self.lacks_validation,
            "skipped_updates": self.updates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.accuracies, self.val_rewards = list(state["accuracies"]), list(state["val_rewards"])
        self.updates.load_state_dict(state["skipped_updates"])
        self.lacks_validation = state.get("lacks_validation", False)

    def note_transition(self, reports: Sequence[TransitionReport]) -> None:
        """Store the cost of the last transfer of weights to generation, in order of rollout ranks."""
        self.transitions = reports

    def update_metrics(self, role: str, updates: Sequence[Future[dict[str, float]]]) -> dict[str, float]:
        """Means over a role's optimizer steps, and the number of skipped ones; warns if there are any. Waits for them.

        Raises NonFiniteUpdates if more than `trainer.max_skipped_updates` in a row were skipped.
        """
        metrics = update_means(role, self._updated(role, updates))
        skipped = int(metrics[f"{role}/skipped_updates"])
        if skipped:
            self.warn(f"{skipped} update(s) of the {role} skipped in this step: gradient or loss not finite")
        return metrics

    def _updated(self, role: str, updates: Sequence[Future[dict[str, float]]]) -> Iterator[dict[str, float]]:
        for number, update in enumerate(updates, start=1):
            self.watch.note = f"mini-batch {number} of {len(updates)}" if len(updates) > 1 else ""
            yield self.updates.note(role, update.get())
        self.watch.note = ""

    def step_metrics(self, experience: Batch, scored: ScoredAnswers) -> dict[str, float]:
        """Statistics of one step's samples, cost of its resharding, and seconds by phase.

        A prompt are the tokens before the first sampled one, a response the sampled tokens. Episodes that failed do not
        count; where all did, there are no statistics of samples.
        """
        if "failed" in experience:
            ended = (~experience["failed"]).nonzero()[:, 0]
            if not len(ended):
                return transition_metrics(self.transitions) | self.time_metrics(0)
            experience, scored = experience[ended], scored[ended]
        lengths = (first_true(experience["sampled"]), experience.num_sampled)
        values = experience.flat("old_values") if "old_values" in experience else None
        returns, advantages = experience.flat("returns"), experience.flat("advantages")
        scores = experience["scores"]
        timings = self.time_metrics(experience.flat("input_ids").numel())
        return (
            length_metrics(*lengths, experience["truncated"])
            | score_metrics(scores, experience["totals"], advantages, returns, values)
            | transition_metrics(self.transitions)
            | scored.metrics()
            | timings
        )

    def time_metrics(self, num_tokens: int) -> dict[str, float]:
        """Seconds of the step that ends, by phase, and throughput for `num_tokens` tokens."""
        timings = self.clock.take_step()
        return throughput_metrics(num_tokens, timings["timing_s/step"], self._num_ranks) | timings

    def memory_metrics(self, hosts: Mapping[str, RankHost]) -> dict[str, float]:
        """Memory of each phase since the last step, measured and planned; the largest over all ranks of all pools."""
        metrics: dict[str, float] = {}
        taken = {pool: host.take_memory() for pool, host in hosts.items()}
        for pool, ranks in taken.items():
            for name, value in memory_metrics(ranks.get(), self._planned_memory[pool]).items():
                metrics[name] = max(value, metrics.get(name, 0.0))
        return metrics

    def save_samples(self, folder: str | None, rows: Batch, scored: ScoredAnswers, step: int) -> None:
        """Write a table of the responses to `folder`, if one is configured; warns if that fails."""
        if folder is not None:
            questions = prompt_texts(self.tokenizer, rows)
            try:
                write_sample_table(Path(folder), step, self.with_images(rows, scored.table(questions, step)))
            except OSError as error:
                self.warn(f"{folder} is missing the table of step {step}: {error}")

    def with_images(self, rows: Batch, table: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the table of these rows with their images, whose pictures are written. Raises OSError."""
        if self.images is not None:
            self.images.add(rows, table)
        return table

    def save_generations(self, rows: Batch, scored: ScoredAnswers, step: int) -> None:
        """Log `trainer.log_val_generations` responses of a validation, of the same rows every time."""
        number = min(self.config.trainer.log_val_generations, len(rows))
        if not number:
            return
        chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.config.trainer.seed))
        kept = chosen[:number].sort().values
        self.save_samples(str(self.folder.path / "val_generations"), rows[kept], scored[kept], step)
        questions = prompt_texts(self.tokenizer, rows[kept])
        self._warn_of(self._services.log_samples(scored[kept].table(questions, step), step))

    def skip_validation(self, step: int) -> None:
        """Record, and warn, that the validation due after `step` waits until the run is resumed."""
        self.lacks_validation = True
        self.warn(f"step {step} is not validated, as the run is to stop; the same command makes up for it")

    def make_up(self, validate: Callable[[int], dict[str, float]]) -> None:
        """Validate and log the step that the run resumes from, if that validation was skipped."""
        step = self.folder.resumed_step
        if step is not None and self.lacks_validation:
            self.lacks_validation = False
            metrics = validate(step)
            self.metric_logger.log(metrics, step)
            self._warn_of(self._services.log(metrics, step))

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one step's metrics and move the progress bar; step 0 is the state before training."""
        with contextlib.suppress(StorageError):  # lines wait in memory; the next checkpoint reports the error
            self.keep_folder()
        if step:
            metrics, self.next_metrics = metrics | self.next_metrics, {}
        self.metric_logger.log(metrics, step)
        self._warn_of(self._services.log(metrics, step))
        with contextlib.suppress(OSError):  # the run's end writes it once more, and warns
            write_calls(self.clock.recent, self.folder.path / TIMELINE_FILE)
        if step:
            accuracy = self.accuracies[-1] if self.accuracies else None
            what, value = shown_value(metrics)
            self.progress.step(step, value, accuracy, metrics["timing_s/step"], what)


def prompt_texts(tokenizer: PreTrainedTokenizerBase, rows: Batch) -> list[str]:
    """Return the texts of the prompts of rows."""
    prompt_ids = [ids.tolist() for ids in prompts_of(rows)["input_ids"].unbind()]
    return list(tokenizer.batch_decode(prompt_ids, skip_special_tokens=True))


def shown_value(metrics: dict[str, float]) -> tuple[str, float]:
    """(name, value) for the progress line: the mean reward of a step, or its loss if there are no rewards."""
    for what, name in (("reward", "critic/score/mean"), ("loss", "actor/loss"), ("loss", "critic/loss")):
        if name in metrics:
            return what, metrics[name]
    return "loss", float("nan")


def transition_metrics(reports: Sequence[TransitionReport]) -> dict[str, float]:
    """Cost of a resharding on the rank where it was highest; {} before the first one. If only what changed travelled,
    also its share of the model, and the least that could be received.
    """
    if not reports:
        return {}
    shares = [report.changed_share for report in reports if report.changed_share is not None]
    bound = max(report.lower_bound_bytes for report in reports) / 1e6
    changed = {"reshard/changed_share": max(shares), "reshard/bound_mb": bound} if shares else {}
    return {
        **changed,
        "reshard/exchange_s": max(report.exchange_seconds for report in reports),
        "reshard/verify_s": max(report.verify_seconds for report in reports),
        "reshard/received_mb": max(report.bytes_received for report in reports) / 1e6,
        "reshard/received_network_mb": max(report.network_bytes for report in reports) / 1e6,
    }
