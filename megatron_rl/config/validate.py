"""Rules of single values, of rewards and of data. Other rules are in `planning.preflight`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_rl.config.adapter_files import PREFIX, WITHOUT_PACKAGE
from megatron_rl.config.algorithms import has_scores, trains_on_rule, uses_rule
from megatron_rl.config.declarations import REWARDS
from megatron_rl.config.judge_rules import judge_problems
from megatron_rl.config.keys import ACTOR, CRITIC, ROLLOUT, value_of
from megatron_rl.config.problems import nearest_name
from megatron_rl.config.reward_keys import ScoringModelConfig
from megatron_rl.config.schema import RunConfig, as_list
from megatron_rl.config.single_values import constraint_problems
from megatron_rl.errors import Violation, shown

REWARD_ARGUMENTS = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""Arguments of every call of a reward function."""


def value_problems(config: RunConfig) -> Iterable[Violation]:
    """Every value that breaks its constraint, and every rule between keys of one group."""
    yield from constraint_problems(config)
    for key in ("algorithm.gdpo_reward_weights", "dpo.loss_weights"):
        weights = value_of(config, key)
        if weights is not None and not all(map(math.isfinite, weights)):
            yield Violation({key: weights}, "must be finite", {key: None})
    trainer = config.trainer
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        path = trainer.resume_from_path
        remedy: dict[str, Any] = {"trainer.resume_mode": "auto" if path is None else "resume_path"}
        if path is not None and not Path(path).expanduser().is_dir():
            remedy = {"trainer.resume_from_path": None}
        yield Violation(
            {"trainer.resume_from_path": trainer.resume_from_path, "trainer.resume_mode": trainer.resume_mode},
            "do not go together: the path is for resume_path, which needs it",
            remedy,
        )
    yield from _optimizer_problems(config)
    yield from reward_problems(config)
    yield from turn_problems(config)
    yield from data_problems(config)


def _optimizer_problems(config: RunConfig) -> Iterable[Violation]:
    for role, optim in ((ACTOR, config.actor_rollout_ref.actor.optim), (CRITIC, config.critic.optim)):
        if optim.lr >= 0 and optim.min_lr > optim.lr:
            key = f"{role}.optim.min_lr"
            yield Violation({key: optim.min_lr}, f"must be <= lr={shown(optim.lr)}", {key: optim.lr})
        if not all(0 <= beta < 1 for beta in optim.betas):
            key = f"{role}.optim.betas"
            yield Violation({key: list(optim.betas)}, "must both be >= 0 and < 1", {key: [0.9, 0.999]})
        if optim.lr_decay_style == "WSD":
            key, last = f"{role}.optim.lr_wsd_decay_steps", optim.lr_wsd_decay_steps
            if last < 1:
                rule = "must, with lr_decay_style=WSD, be >= 1: the last steps, in which the learning rate goes down"
                yield Violation({key: last}, rule, {key: 1})
            elif 0 < optim.lr_decay_steps < last:
                rule = f"must be <= lr_decay_steps={optim.lr_decay_steps}, as they are its last steps"
                yield Violation({key: last}, rule, {key: optim.lr_decay_steps})


def reward_problems(config: RunConfig) -> Iterable[Violation]:
    """Violations of the reward function and the reward models. A task that does not generate needs no reward."""
    custom, reward = config.custom_reward_function, config.reward_model
    yield from _reward_model_problems(config) if config.generates else _shaping_problems("reward_model", reward)
    if custom.path is None and custom.name is not None and custom.name not in REWARDS:
        key = "custom_reward_function.name"
        rule = f"must, without a path, be one of {', '.join(REWARDS)}"
        yield Violation({key: custom.name}, rule, {key: nearest_name(custom.name, REWARDS)}, wrong_name=True)
    if custom.per_group and custom.path is None:
        key = "custom_reward_function.per_group"
        rule = "needs custom_reward_function.path: the built-in reward functions score one response"
        yield Violation({key: True}, rule, {key: False})
    for name in sorted(REWARD_ARGUMENTS & custom.reward_kwargs.keys() if not custom.per_group else ()):
        key = f"custom_reward_function.reward_kwargs.{name}"
        yield Violation({key: custom.reward_kwargs[name]}, "is given by each row", hint="leave it out, or rename it")


def turn_problems(config: RunConfig) -> Iterable[Violation]:
    """Violations of episodes of several turns."""
    key, keys = "actor_rollout_ref.rollout.multi_turn", config.actor_rollout_ref.rollout.multi_turn
    answers = {
        f"{key}.environment.path": keys.environment.path,
        f"{key}.function_tool_path": keys.function_tool_path,
        f"{key}.tool_config_path": keys.tool_config_path,
        f"{key}.agent.path": keys.agent.path,
        f"{key}.agent.command": keys.agent.command,
    }
    chosen = {name: value for name, value in answers.items() if value is not None}
    if not config.has_turns:
        if chosen and config.generates:
            rule = f"must be true, as {', '.join(chosen)} answers turns"
            yield Violation({f"{key}.enable": False}, rule, {f"{key}.enable": True})
        return
    if not chosen:
        rule = f"must be a Python file, as {key}.enable=true and nothing else answers turns: {', '.join(answers)}"
        yield Violation({f"{key}.environment.path": None}, rule, {f"{key}.enable": False})
    elif len(chosen) > 1:
        _, *others = chosen
        yield Violation(chosen, "cannot both be set", dict.fromkeys(others))
    if keys.python is not None and keys.environment.path is None and keys.agent.path is None:
        rule = "runs environment.path or agent.path, and neither is set: tools and commands have the run's own"
        yield Violation({f"{key}.python": keys.python}, rule, {f"{key}.python": None})
    for name, path in ((f"{key}.environment.path", keys.environment.path), (f"{key}.agent.path", keys.agent.path)):
        package = path.removeprefix(PREFIX) if path is not None and path.startswith(PREFIX) else None
        if keys.python is not None and package in WITHOUT_PACKAGE:
            rule = f"must be null with {path}, which the run's own interpreter plays"
            yield Violation({f"{key}.python": keys.python, name: path}, rule, {f"{key}.python": None})
        elif keys.python is None and package is not None and package not in WITHOUT_PACKAGE:
            rule = f"must be an interpreter that has the packages of {path}: the run's own stays without them"
            hint = f"make one: python -m venv envs/{package}, and envs/{package}/bin/python -m pip install PACKAGES"
            near = {f"{key}.python": f"envs/{package}/bin/python"}
            yield Violation({f"{key}.python": None, name: path}, rule, near, hint)
    if keys.agent.command == []:
        yield Violation({f"{key}.agent.command": []}, "must name a program", {f"{key}.agent.command": None})


def _reward_model_problems(config: RunConfig) -> Iterable[Violation]:
    """Violations of the reward models and their weights in the score."""
    reward, has_rule = config.reward_model, uses_rule(config)
    if reward.enable:
        yield from _folder_problems("reward_model", reward, "reward_model.enable=true")
    yield from _shaping_problems("reward_model", reward)
    yield from _further_model_problems(config)
    yield from judge_problems(config)
    has_model = reward.enable or bool(config.reward_models)
    key, name = "custom_reward_function.name", "compute_score"
    if not has_scores(config) and not config.trainer.val_only:
        rule = "must be a function, as reward_model.enable=false: nothing would be rewarded"
        yield Violation({key: None}, rule, {key: name})
    elif not has_rule and config.custom_reward_function.path is not None:
        path = "custom_reward_function.path"
        yield Violation({path: config.custom_reward_function.path}, f"must be null, as {key}=null", {path: None})
    yield from _validation_only_problems(config)
    has_rule = trains_on_rule(config)
    weights = {"reward_model.weight": reward.weight} if reward.enable else {}
    weights |= {f"reward_models.{name}.weight": further.weight for name, further in config.reward_models.items()}
    if (has_rule or has_model) and not (has_rule and reward.rule_weight) and not any(weights.values()):
        weights["reward_model.rule_weight"] = reward.rule_weight
        key, *_ = weights
        yield Violation({key: weights[key]}, "must not be 0, because nothing else gives a score", {key: 1.0})


def _validation_only_problems(config: RunConfig) -> Iterable[Violation]:
    key = "custom_reward_function.validation_only"
    if not config.custom_reward_function.validation_only:
        return
    if not uses_rule(config):
        yield Violation(
            {key: True}, "must be false, as custom_reward_function.name=null: there is no reward function", {key: False}
        )


def _folder_problems(group: str, reward: ScoringModelConfig, reason: str) -> Iterable[Violation]:
    if reward.model.path is None:
        yield Violation({f"{group}.model.path": None}, f"must be a model folder, as {reason}")
    if reward.max_length is not None and reward.model.input_tokenizer is None:
        key = f"{group}.max_length"
        rule = f"is of no use without {group}.model.input_tokenizer: the reward model reads the actor's tokens"
        yield Violation({key: reward.max_length}, rule, {key: None})


def _shaping_problems(group: str, reward: ScoringModelConfig) -> Iterable[Violation]:
    """Prompts that a reward model scores, and the range of its scores."""
    if reward.data_sources is not None and not reward.data_sources:
        key = f"{group}.data_sources"
        yield Violation({key: []}, "must name at least one source of prompts, or be null", {key: None})
    limits, key = reward.reward_clip_range, f"{group}.reward_clip_range"
    if limits is None:
        return
    known = sorted(limit for limit in limits if math.isfinite(limit))
    if len(limits) != 2 or len(known) != 2 or not limits[0] < limits[1]:
        nearest = [known[0], known[-1]] if len(known) > 1 and known[0] < known[-1] else [-10.0, 10.0]
        rule = "must be [lowest, highest], both finite and the first below the second"
        yield Violation({key: limits}, rule, {key: nearest})


def _further_model_problems(config: RunConfig) -> Iterable[Violation]:
    for name, further in config.reward_models.items():
        group = f"reward_models.{name}"
        yield from _folder_problems(group, further, f"{group} is a reward model")
        yield from _shaping_problems(group, further)


def data_problems(config: RunConfig) -> Iterable[Violation]:
    """Violations of files and their weights, and of the number of held-out responses."""
    data, val_kwargs = config.data, config.actor_rollout_ref.rollout.val_kwargs
    if data.truncation == ("drop" if config.generates else "middle"):
        rule = "is for tasks that do not generate" if config.generates else "is only for runs that generate responses"
        nearest = {"data.truncation": "error"} | ({"data.filter_overlong_prompts": True} if config.generates else {})
        yield Violation({"data.truncation": data.truncation}, rule, nearest)
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if not is_path_or_paths(files):
            rule = "must be a path or a list of at least one path"
            yield Violation({key: files}, rule, hint="such as [prompts.parquet]")
    weights, further = data.train_file_weights, config.ptx.files if config.generates else None
    yield from _file_weight_problems("data.train_file_weights", weights, "data.train_files", data.train_files)
    yield from _file_weight_problems("ptx.file_weights", config.ptx.file_weights, "ptx.files", further)
    if val_kwargs.n > 1 and not val_kwargs.do_sample:
        yield Violation(
            {f"{ROLLOUT}.val_kwargs.n": val_kwargs.n, f"{ROLLOUT}.val_kwargs.do_sample": False},
            "ask for one greedy response several times",
            {f"{ROLLOUT}.val_kwargs.do_sample": True},
        )


def _file_weight_problems(key: str, weights: list[float] | None, files_key: str, files: Any) -> Iterable[Violation]:
    """files: of `files_key`; None if they are not read."""
    if weights is not None and is_path_or_paths(files):
        number = len(as_list(files))
        if len(weights) != number:
            rule = f"must be one number for each of {files_key}, of which there are {number}"
            yield Violation({key: weights}, rule, {key: [*map(_usable, weights), *[1.0] * number][:number]})
    if weights is not None and not all(math.isfinite(weight) and weight > 0 for weight in weights):
        yield Violation({key: weights}, "must be > 0 and finite", {key: [*map(_usable, weights)]})


def _usable(weight: float) -> float:
    return weight if math.isfinite(weight) and weight > 0 else 1.0


def is_path_or_paths(files: object) -> bool:
    """Whether `files` is a path or a list of at least one path."""
    listed = [files] if isinstance(files, str) else files
    return isinstance(listed, list) and len(listed) > 0 and all(isinstance(path, str) for path in listed)
