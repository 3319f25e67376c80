"""What a run keeps on the controller: data, reward, seeds, clocks and the books. The algorithm is in `train.py`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.checkpoint.contents import RUN_FILE
from megatron_rl.checkpoint.folders import find, only_writer
from megatron_rl.checkpoint.resume import select
from megatron_rl.checkpoint.run_file import read_run_file, reading
from megatron_rl.checkpoint.storage import storing
from megatron_rl.cluster.signals import StopRequest
from megatron_rl.cluster.watch import STACKS_FILE, Limits
from megatron_rl.cluster.worker_group import Future
from megatron_rl.config.algorithms import needs_of, uses_critic, uses_reference, uses_rule
from megatron_rl.config.load import flat_settings
from megatron_rl.config.schema import ActorConfig, CriticConfig, KlCtrlConfig, RunConfig, TrainerConfig, as_list
from megatron_rl.errors import ConfigError, ParityError, StorageError
from megatron_rl.experience.assemble import add_rewards, assemble
from megatron_rl.losses.kl import AdaptiveKL, FixedKL
from megatron_rl.losses.registry import estimator, policy_loss
from megatron_rl.losses.rows import total_rows
from megatron_rl.observe.batch_metrics import length_metrics, parity_metrics, score_metrics, throughput_metrics
from megatron_rl.observe.loggers import MetricLogger
from megatron_rl.observe.memory import PhaseMemory, memory_metrics
from megatron_rl.observe.progress import RunProgress
from megatron_rl.observe.sample_tables import write_sample_table
from megatron_rl.observe.summary import layout_table
from megatron_rl.observe.timers import PhaseTimer
from megatron_rl.observe.updates import SkippedUpdates, update_means
from megatron_rl.observe.validation import validation_metrics
from megatron_rl.planner.batch_arithmetic import batch_table, repeat_notes
from megatron_rl.planner.file_rules import make_folders
from megatron_rl.planner.memory import plan_stages, worst_of_stages
from megatron_rl.planner.resume_rules import configured_models
from megatron_rl.planner.run_models import RunModels
from megatron_rl.planner.stall import stall_timeout_s
from megatron_rl.prompts.dataset import PromptDataset
from megatron_rl.prompts.mixture import MixtureCursor
from megatron_rl.records import Experience, Generations, Prompts, Sampling, Sequences, row_lengths
from megatron_rl.reward.combined import combine
from megatron_rl.reward.function import RewardSource
from megatron_rl.reward.keeper import KeeperSettings
from megatron_rl.reward.overlong import overlong_penalty
from megatron_rl.reward.processes import RewardProcesses
from megatron_rl.reward.rule import NoRule, RuleReward, Scored

VALIDATION_SALT = -1
"""Validation samples, where they are sampled, use the same seeds every time."""

NUM_PARITY_ROWS = 32
"""Held-out rows on which the exported model is compared with the trainer."""

MAY_CHANGE = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.total_training_steps")
"""Keys whose new values are no news in a run that goes on."""


class StepAbandoned(Exception):
    """A step is given up before it has changed anything, because a signal asked the run to stop and time is short."""


class Run:
    """One run's state outside the workers; a context manager round progress bar and loggers.

    Constructing it reads data, reward function and the checkpoint to go on from, so that their errors come before any
    process starts. Raises ConfigError.
    """

    def __init__(self, config: RunConfig, stop: StopRequest) -> None:
        data, trainer = config.data, config.trainer
        self.config = config
        self.stop = stop
        self.started = time.monotonic()
        self.directory = Path(trainer.default_local_dir)
        self.console = Console()
        self.tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        has_rule = uses_rule(config)
        self.train_data = PromptDataset(as_list(data.train_files), self.tokenizer, data, has_rule)
        self.val_data = PromptDataset(as_list(data.val_files), self.tokenizer, data, has_rule)
        self.cursor = MixtureCursor(
            self.train_data.files, data.train_file_weights, data.gen_batch_size, data.shuffle, data.seed
        )
        self.rules = rule_reward(config, self.tokenizer, self.train_data.data_sources | self.val_data.data_sources)
        self.progress = RunProgress(trainer.total_training_steps, self.console)
        self.timer = PhaseTimer(on_phase=self.progress.phase)
        self.phase = self.timer.phase

        self.has_critic, self.has_reference = uses_critic(config), uses_reference(config)
        self.has_reward_model = config.reward_model.enable
        self.needs_greedy = needs_of(config).greedy
        self.estimator = estimator(config.algorithm)
        policy_loss(config.actor_rollout_ref.actor)  # the workers', loaded here too so that its errors come now
        self.kl_ctrl = kl_controller(config.algorithm.kl_ctrl)
        self._found = find(self.directory)
        # Read once: the checkpoints of this run are of the folders as they were when it started.
        self.models = configured_models(config)
        self.start = select(trainer, self.models)

        self.planned_memory = worst_of_stages(plan_stages(RunModels(config)))
        self.transitions: list = []
        self.sampling_metrics: dict[str, float] = {}
        self.accuracies: list[float] = []
        self.val_rewards: list[float] = []
        self.updates = SkippedUpdates(trainer.max_skipped_updates)
        self.logprob_diff_max = 0.0
        self.parity_rows: Sequences | None = None
        self.save_seconds = 0.0
        self._step_started, self._last_step_s = 0.0, math.inf
        self.saved: dict[str, Any] = {}
        self._read_saved()
        make_folders(trainer)
        self._resources = contextlib.ExitStack()

    def __enter__(self) -> Run:
        """Raises ConfigError when another run is in the folder, StorageError when it cannot be written to."""
        with storing("the files of a run", self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = self._resources.enter_context(only_writer(self.directory))
            self._look_again()
            resumed_step = None if self.start.path is None else self.start.step
            self.logger = self._resources.enter_context(
                MetricLogger(self.config.trainer.logger, self.directory, self.console, resumed_step)
            )
        self.console.print(layout_table(batch_table(self.config)))
        for note in repeat_notes(self.config.data, [file.num_prompts for file in self.train_data.files]):
            self.warn(note)
        for reason in self.start.skipped:
            self.warn(f"skipped {reason}")
        self._resources.enter_context(self.rules)
        self._resources.enter_context(self.progress)
        return self

    def __exit__(self, *failure) -> None:
        self._resources.close()

    def _read_saved(self) -> None:
        if self.start.path is not None:
            file = self.start.path / RUN_FILE
            self.saved = read_run_file(file)
            with reading(file):
                self.load_state_dict(self.saved["run"])

    def _look_again(self) -> None:
        """Choose the checkpoint anew where a run that was still ending has saved one while this one started."""
        if find(self.directory) != self._found:
            self.start = select(self.config.trainer, self.models)
            self._read_saved()

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line as it is: names and values may have brackets, which would be markup."""
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a line that nobody should miss."""
        self.say(text, style="yellow")

    def keep_folder(self) -> None:
        """Make the run's folder again, and say so, where it has vanished.

        Raises ConfigError where another run has taken it, StorageError where it cannot be made.
        """
        with storing("the files of a run", self.directory):
            if self._lock.hold_again():
                self.warn(
                    f"{self.directory} was deleted or emptied while the run went on; it is there again, without the "
                    "checkpoints and tables that were in it"
                )

    def say_resumed(self, saved_config: dict[str, Any], same_layout: bool) -> None:
        """Tell where the run goes on, and every key that has another value than it had when that was saved."""
        self.say(f"going on after step {self.start.step}, from {self.start.path}")
        before, now = flat_settings(saved_config), flat_settings(dataclasses.asdict(self.config))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key) and key not in MAY_CHANGE:
                self.say(f"  {key} was {before.get(key)}, is {now.get(key)}")
        if not same_layout:
            self.say("  random generators start anew: they were saved for another layout")

    # Data and sampling

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to take: from 1, or from after the checkpoint that the run goes on from."""
        for step in range(self.start.step + 1, self.config.trainer.total_training_steps + 1):
            self._step_started = time.monotonic()
            yield step
            self._last_step_s = time.monotonic() - self._step_started

    def abandon_step_if_late(self) -> None:
        """Raise StepAbandoned when the run is to stop and this step would not end in time, judging by the last one."""
        left = self._last_step_s + self.save_seconds - (time.monotonic() - self._step_started)
        if self.stop.is_set and left > self.stop.remaining_s():
            raise StepAbandoned

    @property
    def saves_beside_training(self) -> bool:
        """Whether a save may still be under way when the next step starts."""
        critic_does = self.has_critic and self.config.critic.checkpoint.async_save
        return self.config.actor_rollout_ref.actor.checkpoint.async_save or critic_does

    # What a checkpoint keeps of all this

    def state_dict(self, step: int) -> dict[str, Any]:
        """Everything that the steps after `step` depend on, or that they add to; JSON-ready."""
        return {
            "step": step,
            "cursor": self.cursor.state_dict(),
            "kl_ctrl": {"type": self.config.algorithm.kl_ctrl.type, "coef": self.kl_ctrl.coef},
            "accuracies": list(self.accuracies),
            "val_rewards": list(self.val_rewards),
            "logprob_diff_max": self.logprob_diff_max,
            "skipped_updates": self.updates.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises ConfigError when the prompts or their order are others."""
        self.cursor.load_state_dict(state["cursor"])
        # A fixed weight is the configuration's, which may have been changed on purpose.
        if state["kl_ctrl"]["type"] == self.config.algorithm.kl_ctrl.type == "adaptive":
            self.kl_ctrl.coef = state["kl_ctrl"]["coef"]
        self.accuracies, self.val_rewards = list(state["accuracies"]), list(state["val_rewards"])
        self.logprob_diff_max = state["logprob_diff_max"]
        self.updates.load_state_dict(state["skipped_updates"])

    def next_prompts(self) -> Prompts:
        """The next training prompts, each `rollout.n` times."""
        return self.train_data.batch(self.cursor.next_indices()).repeat(self.config.actor_rollout_ref.rollout.n)

    def val_prompts(self) -> Prompts:
        """All held-out prompts, each `val_kwargs.n` times."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        return self.val_data.batch(range(len(self.val_data))).repeat(n)

    def sampling(self, salt: int) -> Sampling:
        """How training samples are drawn."""
        rollout = self.config.actor_rollout_ref.rollout
        return Sampling(rollout.temperature, rollout.top_p, rollout.top_k, self.config.data.max_response_length, salt)

    def greedy(self) -> Sampling:
        """How a baseline answer is drawn: greedily, so its seed means nothing."""
        return Sampling(0.0, 1.0, -1, self.config.data.max_response_length, VALIDATION_SALT)

    def val_sampling(self) -> Sampling:
        """How held-out answers are drawn: greedy unless `val_kwargs.do_sample`."""
        kwargs = self.config.actor_rollout_ref.rollout.val_kwargs
        longest = self.config.data.max_response_length
        if not kwargs.do_sample:
            return Sampling(0.0, 1.0, -1, longest, VALIDATION_SALT)
        return Sampling(kwargs.temperature, kwargs.top_p, kwargs.top_k, longest, VALIDATION_SALT)

    def mini_batching(self, role: ActorConfig | CriticConfig, step: int) -> tuple[int, int, int | None]:
        """(rows per optimizer step, epochs, seed of the split or None) for one step of a role's update."""
        rows = role.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n
        seed = self.config.trainer.seed * 1_000_003 + step * role.ppo_epochs
        return rows, role.ppo_epochs, seed if role.shuffle else None

    def reward(self, prompts: Prompts, generations: Generations, rm_scores: Future | None) -> Scored:
        """Score answers, by the rule while the reward model does, and says so when the rule could not score some.

        Raises RewardError when it could score none, or when the reward model gives no number.
        """
        scored, config = self.rules(prompts, generations), self.config.reward_model
        if scored.first_failure is not None:
            failed = sum(outcome.failure != "" for outcome in scored.outcomes)
            first = scored.first_failure
            self.warn(f"{failed} of {len(scored.outcomes)} samples could not be scored; the first: {first}")
        of_model = None if rm_scores is None else rm_scores.get().scores
        return combine(scored, of_model, config.rule_weight, config.weight)

    def scored(self, prompts: Prompts, generations: Generations, rm_scores: Future | None) -> Scored:
        """What training rewards: the task reward, less the penalty of overlong answers if configured."""
        scored, overlong = self.reward(prompts, generations, rm_scores), self.config.reward_model.overlong_buffer
        if not overlong.enable:
            return scored
        lengths, longest = row_lengths(generations.response_ids), self.config.data.max_response_length
        penalty = overlong_penalty(lengths, longest, overlong.len, overlong.penalty_factor)
        return dataclasses.replace(scored, scores=scored.scores + penalty)

    def greedy_scores(self, prompts: Prompts, generations: Generations, rm_scores: Future | None) -> torch.Tensor:
        """float32 [B]: for each row of `prompts` the score of its group's answer, in the order of `one_per_group`."""
        _, group = prompts.uid.unique(return_inverse=True)
        return self.scored(prompts.one_per_group(), generations, rm_scores).scores[group]

    # Books

    def note_transition(self, reports: list) -> None:
        """Keep what entering rollout mode cost each rank (in rank order)."""
        self.transitions = reports

    def note_sampling(self, num_batches: int, differing_share: float) -> None:
        """Keep how many batches dynamic sampling drew, and which share of the step's groups have different scores."""
        self.sampling_metrics = {
            "train/num_gen_batches": float(num_batches),
            "train/differing_groups": differing_share,
        }

    def check_rollout_parity(self, experience: Experience) -> dict[str, float]:
        """Compare the engine's log-probs of its samples with the trainer's.

        Raises ParityError beyond `rollout.logprob_diff_bound`; not where top_p or top_k cut the engine's distribution,
        because then the two are meant to differ.
        """
        rollout = self.config.actor_rollout_ref.rollout
        metrics = parity_metrics(experience.rollout_log_probs.values(), experience.old_log_probs.values())
        largest = metrics.get("training/rollout_logprob_diff_max", 0.0)  # of no token there is nothing to compare
        comparable = rollout.top_p == 1.0 and rollout.top_k == -1
        if comparable:
            self.logprob_diff_max = max(self.logprob_diff_max, largest)
        if comparable and not largest <= rollout.logprob_diff_bound:
            raise ParityError(
                f"log-probs of the rollout and of the trainer differ by {largest:.3g} on sampled tokens; "
                f"actor_rollout_ref.rollout.logprob_diff_bound is {rollout.logprob_diff_bound:.3g}"
            )
        return metrics

    def penalise_kl(self, experience: Experience) -> dict[str, float]:
        """Fill `rewards`, weigh the KL penalty anew for the next step, and report KL and weight as verl does."""
        algorithm = self.config.algorithm
        kl_coef = self.kl_ctrl.coef if algorithm.use_kl_in_reward else 0.0
        kl = add_rewards(experience, kl_coef, algorithm.kl_penalty)
        if kl is None:
            return {}
        self.kl_ctrl.update(float(kl), int((experience.response_lengths > 0).sum()))
        return {"actor/reward_kl_penalty": float(kl), "actor/reward_kl_penalty_coeff": kl_coef}

    def data_metrics(self, prompts: Prompts, generations: Generations, experience: Experience) -> dict[str, float]:
        """Statistics of one step's samples, and what its transition cost."""
        lengths = (row_lengths(prompts.prompt_ids), row_lengths(generations.response_ids))
        values = None if experience.old_values is None else experience.old_values.values()
        returns, advantages = experience.returns.values(), experience.advantages.values()
        totals = total_rows(experience.rewards.values(), experience.response_lengths, experience.scores)
        return (
            length_metrics(*lengths, generations.truncated)
            | score_metrics(experience.scores, totals, advantages, returns, values)
            | {"perf/total_num_tokens": float(experience.input_ids.values().numel())}
            | self.sampling_metrics
            | self._transition_metrics()
        )

    def _transition_metrics(self) -> dict[str, float]:
        """The last transition to rollout mode, on the rank that it cost most."""
        return {
            "reshard/exchange_s": max(report.exchange_seconds for report in self.transitions),
            "reshard/verify_s": max(report.verify_seconds for report in self.transitions),
            "reshard/received_mb": max(report.bytes_received for report in self.transitions) / 1e6,
            "reshard/received_network_mb": max(report.network_bytes for report in self.transitions) / 1e6,
        }

    def val_metrics(self, prompts: Prompts, generations: Generations, scored: Scored) -> dict[str, float]:
        """verl's validation metrics per data source; keeps a few rows to compare the exported model on."""
        variables = scored.variables()
        self.val_rewards.append(sum(variables["reward"]) / len(prompts))
        if "acc" in variables:
            self.accuracies.append(sum(variables["acc"]) / len(prompts))
        self.parity_rows = assemble(prompts[:NUM_PARITY_ROWS], generations[:NUM_PARITY_ROWS]).sequences()
        sources, predictions = list(prompts.data_source), scored.predictions()
        return validation_metrics(sources, prompts.index.tolist(), variables, predictions)

    def save_samples(self, folder: str | None, prompts: Prompts, scored: Scored, step: int) -> None:
        """Write a table of the answers, where a folder for it is configured."""
        if folder is not None:
            prompt_ids = [ids.tolist() for ids in prompts.prompt_ids.unbind()]
            questions = self.tokenizer.batch_decode(prompt_ids, skip_special_tokens=True)
            try:
                write_sample_table(Path(folder), step, scored.table(questions, step))
            except OSError as error:
                self.warn(f"{folder} lacks the table of step {step}: {error}")

    def update_metrics(self, role: str, updates: Iterable[dict[str, float]]) -> dict[str, float]:
        """Means over the optimizer steps that a role took, and how many it skipped; says so when there are some.

        Raises NonFiniteUpdates when more than `trainer.max_skipped_updates` in a row were skipped.
        """
        noted = (self.updates.note(role, update) for update in updates)
        metrics = update_means(role, noted)
        skipped = int(metrics[f"{role}/skipped_updates"])
        if skipped:
            self.warn(f"{skipped} update(s) of the {role} skipped in this step: gradient or loss not finite")
        return metrics

    def memory_metrics(self, ranks: list[dict[str, PhaseMemory]]) -> dict[str, float]:
        """What the ranks held in each phase since the last step, beside what was planned."""
        return memory_metrics(ranks, self.planned_memory)

    def take_timings(self, *names: str) -> dict[str, float]:
        """Seconds per phase since the last call, and forget them; only `names` where some are given."""
        timings = self.timer.as_metrics()
        self.timer.reset()
        return {name: timings[name] for name in names or timings}

    def log(self, metrics: dict[str, float], step: int) -> None:
        """Write one step's metrics and move the progress bar; step 0 is the state before training."""
        if step:
            trainer, seconds = self.config.trainer, metrics["timing_s/step"]
            num_ranks = trainer.nnodes * trainer.n_gpus_per_node
            metrics |= throughput_metrics(int(metrics["perf/total_num_tokens"]), seconds, num_ranks)
        with contextlib.suppress(StorageError):  # lines wait; the next checkpoint says what is lost
            self.keep_folder()
        self.logger.log(metrics, step)
        if step:
            accuracy = self.accuracies[-1] if self.accuracies else None
            self.progress.step(step, metrics["critic/score/mean"], accuracy, seconds)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder. Raises ConfigError where its files are damaged or do not go together."""
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # the library's own, and bare ones of its parsers
        reason = f"{type(error).__name__}: {error!s:.500}"
        raise ConfigError(f"the tokenizer of actor_rollout_ref.model.path={path} cannot be loaded: {reason}") from error


def is_validation_step(trainer: TrainerConfig, step: int) -> bool:
    """Every `test_freq` steps, and always the last."""
    return step == trainer.total_training_steps or (trainer.test_freq > 0 and step % trainer.test_freq == 0)


def stop_grace_s(trainer: TrainerConfig) -> float | None:
    """Seconds that a signal leaves a run to stop in; None, at once, where nothing is saved."""
    return trainer.stop_grace_s if trainer.save_freq > 0 else None


def watch_limits(config: RunConfig) -> Limits:
    """When a rank counts as hung, and where the run's folder keeps the stacks of all ranks then."""
    trainer = config.trainer
    return Limits(stall_timeout_s(config), trainer.heartbeat_timeout_s, Path(trainer.default_local_dir) / STACKS_FILE)


def rule_reward(config: RunConfig, tokenizer: PreTrainedTokenizerBase, data_sources: set[str]) -> RuleReward | NoRule:
    """The configured rules. Raises ConfigError where the function cannot be loaded or cannot judge a data source."""
    custom, reward = config.custom_reward_function, config.reward_model
    if custom.name is None:
        return NoRule(tokenizer)
    source = RewardSource(custom.path, custom.name, custom.reward_kwargs)
    source.check(data_sources)
    settings = KeeperSettings(source, reward.num_workers, reward.timeout_s, give_up=reward.stop_if_all_failed)
    return RuleReward(RewardProcesses(settings), tokenizer, reward.failed_score, reward.stop_if_all_failed)


def kl_controller(config: KlCtrlConfig) -> FixedKL | AdaptiveKL:
    """What weighs the KL penalty, at its start."""
    if config.type == "adaptive":
        return AdaptiveKL(config.kl_coef, config.target_kl, config.horizon)
    return FixedKL(config.kl_coef)
