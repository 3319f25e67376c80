"""A PPO run: its data, rewards, roles, algorithm, lifecycle and logger, put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.cluster.replicas import ReplicatedPool
from megatron_rl.config.algorithms import trains_on_rule, uses_rule
from megatron_rl.config.roles import ACTOR, CRITIC, ROLLOUT, Placement, RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.config.steps import validates, with_steps
from megatron_rl.controller.algorithm import Algorithm
from megatron_rl.controller.lifecycle import Lifecycle, StopPolicy
from megatron_rl.controller.open_episodes import open_episodes, with_tools
from megatron_rl.controller.open_sampler import open_sampler, open_schedule, with_all_replicas
from megatron_rl.controller.pretraining import Pretraining
from megatron_rl.controller.recorded_samples import record_samples
from megatron_rl.controller.repairs import Repairs
from megatron_rl.controller.response_ends import end_token_notes
from megatron_rl.controller.run_folder import RunFolder
from megatron_rl.controller.run_images import image_features, prompt_images
from megatron_rl.controller.run_judges import RunJudges
from megatron_rl.controller.run_logger import RunLogger
from megatron_rl.controller.run_scorers import prompt_feedback, scorers_of, user_scorers
from megatron_rl.controller.run_setup import RunBase, RunPools, raise_failures, take_folder
from megatron_rl.controller.validation import PromptValidation
from megatron_rl.controller.written_pictures import written_pictures
from megatron_rl.data.prompt_dataset import PromptDataset, untemplated_notes
from megatron_rl.data.prompt_mixture import MixtureCursor
from megatron_rl.data.prompt_sampler import PromptSampler
from megatron_rl.dispatch import Dispatch, RemoteMethod, Stop
from megatron_rl.errors import WorkerFailure
from megatron_rl.observe.phase_watch import watching
from megatron_rl.planning.batch_arithmetic import group_notes, repeat_notes
from megatron_rl.planning.hardware import Hardware, planned_hardware
from megatron_rl.planning.memory import planned_memory
from megatron_rl.planning.memory_report import with_kv_cache
from megatron_rl.planning.planned_steps import PLANNED, PlannedSteps
from megatron_rl.roles.actor import Actor
from megatron_rl.roles.critic import Critic
from megatron_rl.roles.judge import Judge
from megatron_rl.roles.rollout import Rollout
from megatron_rl.roles.scoring_roles import RewardModel
from megatron_rl.sampling.sampler import Sampler, Sources
from megatron_rl.scoring.batch_scorers import HeldOutScorer, RewardScorer, Scorer
from megatron_rl.scoring.group_function import source_of
from megatron_rl.scoring.group_reward import reward_of
from megatron_rl.scoring.reward_processes import RewardHere, RewardProcesses
from megatron_rl.scoring.rewards import Rewards, reward_shaping, text_readers
from megatron_rl.scoring.rule import NoRule, RuleReward
from megatron_rl.scoring.sampled_batch import SampledBatch
from megatron_rl.scoring.sources import check_sources
from megatron_rl.scoring.teachers import check_teachers, other_prompts
from megatron_rl.scoring.user_verdict import verdicts_of
from megatron_rl.user_code.first_prints import PRINTS_FILE

NEXT_BATCH = RemoteMethod(Dispatch.ONE_TO_ALL, "gen", stop=Stop.BEFORE)
"""A wait for responses, as a remote method that a run may stop before."""


@dataclass(frozen=True)
class Roles:
    """Handles of roles; None for a role that the run does not have. Roles that only score are scorers.

    rollout: all its ranks, or its replicas where its pool is cut into them.
    """

    actor: Actor
    rollout: Rollout | ReplicatedPool
    critic: Critic | None
    reward_models: list[tuple[RoleSpec, RewardModel]]
    judges: dict[str, Judge]

    @classmethod
    def of(cls, pools: RunPools, logger: RunLogger) -> Roles:
        """Take the handles, and connect an actor and a rollout of two pools. Raises WorkerFailure as `connect`."""
        placement = pools.placement
        replicas = pools.cluster.replicated.get(placement.roles[ROLLOUT].pool)
        critic = pools.handle(CRITIC, Critic) if CRITIC in placement.roles else None
        models = [(spec, pools.handle(spec.name, RewardModel)) for spec in placement.reward_models]
        actor, rollout = pools.handle(ACTOR, Actor), replicas or pools.handle(ROLLOUT, Rollout)
        if not (isinstance(rollout, ReplicatedPool) or placement.is_colocated):
            with logger.clock.waiting("connect weight transfer"):
                connect(actor, rollout, placement.pool_of(ROLLOUT).world_size)
        judges = {spec.name: pools.handle(spec.name, Judge) for spec in placement.judges}
        return cls(actor, rollout, critic, models, judges)


@dataclass(frozen=True)
class Run(RunBase):
    """The parts of a PPO run. planned: None without a hardware file."""

    roles: Roles
    sampler: Sampler
    scorers: Sequence[Scorer]
    algorithm: Algorithm
    pretraining: Pretraining
    validation: PromptValidation
    planned: PlannedSteps | None = None

    def describe(self, batch: SampledBatch) -> dict[str, float]:
        """Metrics of a step in addition to its updates: samples, seconds and memory. Also writes the table of its
        responses."""
        scored = batch.all_scored
        metrics = self.sampler.describe() | batch.metrics  # while the step's clock runs
        metrics |= self.logger.step_metrics(batch.rows, scored)
        if self.planned is not None:
            planned, departures = self.planned.note(metrics)
            metrics |= planned
            self.logger.watch.planned = {name.removeprefix(PLANNED): value for name, value in planned.items()}
            for sentence in departures:
                self.logger.warn(sentence)
        self.logger.save_samples(self.config.trainer.rollout_data_dir, batch.rows, scored, batch.step)
        record_samples(self.logger, batch)
        if not validates(self.config.trainer):
            self.validation.take_parity_rows(batch.rows)
        return metrics | self.logger.memory_metrics(self.pools.hosts)


@contextmanager
def open_run(repairs: Repairs, local: bool = False, replay: Path | None = None) -> Iterator[Run]:
    """Open a PPO run, ready for its first step.

    Errors of data, rewards and checkpoints are raised before any process is started. repairs: what the run keeps when
    its ranks are started again, and the configuration; the other arguments are those of `train.train`.
    """
    config, trainer = repairs.config, repairs.config.trainer
    with ExitStack() as opened:
        placement, folders = Placement.of(config), repairs.folders
        tokenizer = (policy := folders[config.actor_rollout_ref.model.path]).tokenizer
        config = with_tools(with_all_replicas(config, replay))
        with watching("reading of the prompts"):
            data = Data.of(config, repairs.once("prompts", partial(read_prompts, config, policy)))
        config = with_steps(with_kv_cache(config, hardware_here(config), folders), len(data.train))
        alone = check_sources(config, data.sources)
        check_teachers(config, data.train.data_sources)
        prompts_of_teachers = other_prompts(config, tokenizer, data.train)
        rules = rule_reward(config, tokenizer, data.judged_sources(config), local)
        readers, template_notes = text_readers(config, folders, (data.train, data.val))
        shaping = reward_shaping(config)
        own_scorers, pretraining = user_scorers(config), Pretraining(config, policy)
        judges = RunJudges.of(config, policy, folders, replay, data.by_key)
        chats = data.train.are_chats | data.val.are_chats
        episodes = open_episodes(config, policy, chats, local, opened, data.train.images, replay is not None)
        folder = RunFolder(config, repairs)
        logger = RunLogger(config, folder, tokenizer, planned_memory(config, folders))
        logger.images = written_pictures(folder.path, data.train.images)
        verdicts = verdicts_of(config, logger.warn, local)
        algorithm = Algorithm(config, logger.clock, logger.warn)
        parts = (data, algorithm, shaping, pretraining, judges.record, logger)
        ends = end_token_notes(policy, config.data.apply_chat_template_kwargs, True in chats)
        notes = () if episodes is None else episodes.notes
        plain = untemplated_notes(chats, tokenizer, config.data)
        warnings = (*ends, *plain, *notes, *data.notes(config), *alone, *template_notes, *pretraining.notes)
        take_folder(opened, logger, parts, warnings=warnings)
        schedule = open_schedule(config, placement, folder, opened, replay)
        opened.enter_context(rules)
        opened.enter_context(verdicts or nullcontext())
        stop_policy = StopPolicy(repairs.stop)
        pools = RunPools.open(opened, placement, logger, stop_policy, local, repairs)
        roles = Roles.of(pools, logger)
        changed = (readers, shaping, judges.judges)
        rewards = Rewards(config, rules, roles.reward_models, logger.warn, logger.clock, *changed)
        rewarding, made = RewardScorer(rewards), scorers_of(config, pools, algorithm, own_scorers, prompts_of_teachers)
        scorers = [*prompt_feedback(data.cursor), *made, rewarding]
        rest = (episodes, verdicts, image_features(placement, data.train.images, roles.actor))
        sources = Sources(config, data.train, data.cursor, rewarding, logger, *rest)
        checks = (partial(raise_failures, pools.cluster), partial(stop_policy.before, NEXT_BATCH))
        sampler = open_sampler(schedule, sources, roles.actor, roles.rollout, checks, opened)
        judges.connect(placement, roles.judges, sampler)
        for facts in (sampler.awaited.progress, rules.under_way):
            logger.watch.ask(facts)
        held_out: list[Scorer] = [*(scorer for scorer in own_scorers if scorer.in_validation), HeldOutScorer(rewards)]
        validation = PromptValidation(config, logger, repairs.stop, data.val, sampler, held_out)
        life = Lifecycle(logger, pools.hosts, parts, stop_policy, sampler, repairs)
        life.restore()
        pools.begin_followers(folder.start.step)
        sampler.load_weights(folder.start.step)
        ppo_parts = (roles, sampler, scorers, algorithm, pretraining, validation)
        planned = None if trainer.hardware_file is None else PlannedSteps(config, hardware_here(config), folders)
        with life:
            yield Run(config, pools, life, logger, repairs, *ppo_parts, planned)


@dataclass(frozen=True)
class Data:
    """Training and held-out prompts, and the position in the training prompts."""

    train: PromptDataset
    val: PromptDataset
    cursor: MixtureCursor | PromptSampler

    @classmethod
    def of(cls, config: RunConfig, prompts: tuple[PromptDataset, PromptDataset]) -> Data:
        """The position is the beginning. Raises ConfigError."""
        data, (train, val) = config.data, prompts
        if data.sampler.path is not None:
            return cls(train, val, PromptSampler(data.sampler, train, data.gen_batch_size, data.seed))
        cursor = MixtureCursor(train.files, data.train_file_weights, data.gen_batch_size, data.shuffle, data.seed)
        return cls(train, val, cursor)

    @property
    def by_key(self) -> dict[str, PromptDataset]:
        """The prompts by the key of their files."""
        return {"data.train_files": self.train, "data.val_files": self.val}

    @property
    def sources(self) -> set[str]:
        """The data sources of all prompts."""
        return self.train.data_sources | self.val.data_sources

    def judged_sources(self, config: RunConfig) -> set[str]:
        """The data sources of all prompts whose responses a reward function scores."""
        return self.val.data_sources | (self.train.data_sources if trains_on_rule(config) else set())

    def state_dict(self) -> dict[str, Any]:
        """Position in the training prompts; JSON-ready."""
        return {"cursor": self.cursor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken. Raises ConfigError when the prompts or their order differ."""
        self.cursor.load_state_dict(state["cursor"])

    def notes(self, config: RunConfig) -> list[str]:
        """Warnings about batches that take a prompt more than once, and about groups of one response; none without
        training.
        """
        if config.trainer.val_only:
            return []
        return [*repeat_notes(config.data, [file.num_prompts for file in self.train.files]), *group_notes(config)]


def read_prompts(config: RunConfig, policy: ModelFolder) -> tuple[PromptDataset, PromptDataset]:
    """Training and held-out prompts. Raises ConfigError."""
    data, keeps_text = config.data, config.has_turns or any(role.reads_text for role in roles_of(config))
    keeps_text = keeps_text or bool(config.judges)
    num_tokens, images = policy.settings["vocab_size"], prompt_images(config, policy)
    train, val = (
        PromptDataset(as_list(files), policy.tokenizer, data, is_judged, keeps_text, num_tokens, most, images)
        for files, is_judged, most in (
            (data.train_files, trains_on_rule(config), data.train_max_samples),
            (data.val_files, uses_rule(config), data.val_max_samples),
        )
    )
    return train, val


def connect(actor: Actor, rollout: Rollout, num_receivers: int) -> None:
    """Connect the ranks of both pools. Raises WorkerFailure if that fails."""
    address = actor.offer_transfer(num_receivers).get()
    joining = actor.join_transfer(address), rollout.join_transfer(address)
    for broken in (one for future in joining for one in future.get() if one):
        raise WorkerFailure(f"the actor's ranks and the rollout's cannot meet: {broken}", is_loss=True)


def hardware_here(config: RunConfig) -> Hardware:
    """Hardware that the plan of this run assumes: this machine's GPU if there is one, else the default."""
    hardware = planned_hardware(config)
    if config.trainer.device == "cuda" and torch.cuda.is_available():
        return replace(hardware, memory_bytes=float(torch.cuda.get_device_properties(0).total_memory))
    return hardware


def rule_reward(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, data_sources: set[str], local: bool
) -> RuleReward | NoRule:
    """The configured rules; local: called in this process.

    Raises ConfigError where the function cannot be loaded or cannot judge a data source.
    """
    custom, reward = config.custom_reward_function, config.reward_model
    if custom.name is None:
        return NoRule(tokenizer)
    prints_file = Path(config.trainer.default_local_dir).resolve() / PRINTS_FILE
    source = source_of(custom, str(prints_file))
    source.check(data_sources)
    stops = reward.stop_if_all_failed
    processes = RewardHere(source) if local else RewardProcesses(source, reward.num_workers, reward.timeout_s, stops)
    return reward_of(source)(processes, tokenizer, reward.failed_score, stops)
