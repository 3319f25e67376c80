"""Rules of teachers: their names, folders and vocabularies, and what goes with a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megatron_rl.checkpoint.model_folder import ModelFolders
from megatron_rl.config.algorithms import distillation_reads
from megatron_rl.config.declarations import DISTILLATION_LOSSES
from megatron_rl.config.distillation_keys import SELF
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.folder_files import different_tokens
from megatron_rl.planning.pool_rules import OWN_ROLES

GROUP, LOSS = "distillation.teacher_models", "distillation.distillation_loss"
MODE, GRADIENT = f"{LOSS}.loss_mode", f"{LOSS}.use_policy_gradient"


def distillation_problems(config: RunConfig, folders: ModelFolders) -> Iterable[Violation]:
    """Every violation of the keys of `distillation`; none where it is not enabled."""
    distillation = config.distillation
    if not distillation.enabled:
        return
    if not distillation.teacher_models:
        rule = "needs a teacher: set distillation.teacher_models.NAME.model_path"
        yield Violation({"distillation.enabled": True}, rule, {"distillation.enabled": False})
    if distillation.teacher_key != config.data.reward_fn_key:
        rule = f"must be data.reward_fn_key={config.data.reward_fn_key}: one column identifies rows"
        nearest = {"distillation.teacher_key": config.data.reward_fn_key}
        yield Violation({"distillation.teacher_key": distillation.teacher_key}, rule, nearest)
    yield from _name_problems(config)
    yield from _routing_problems(config)
    for name in distillation.teacher_models:
        yield from _model_problems(config, name, folders)
    if distillation.distillation_loss.loss_mode in DISTILLATION_LOSSES:
        yield from _loss_problems(config)


def _name_problems(config: RunConfig) -> Iterable[Violation]:
    for name, teacher in config.distillation.teacher_models.items():
        given = {f"{GROUP}.{name}.model_path": teacher.model_path}
        if name in OWN_ROLES or name in config.reward_models:
            rule = f"must belong to a teacher of another name: {name} is a role already"
            yield Violation(given, rule, hint=f"rename it, such as {GROUP}.{name}_teacher")
        elif not name.isidentifier():
            rule = f"must belong to a teacher whose name is a Python identifier, and {name!r} is none"
            yield Violation(given, rule, hint=f"rename it, such as {GROUP}.teacher")


def _routing_problems(config: RunConfig) -> Iterable[Violation]:
    """Each of several teachers has prompts of its own, named by its key."""
    teachers = config.distillation.teacher_models
    if len(teachers) < 2:
        return
    times = Counter(teacher.key for teacher in teachers.values())
    for name, teacher in teachers.items():
        key = f"{GROUP}.{name}.key"
        if teacher.key is None:
            rule = f"must be a value of column {config.distillation.teacher_key}, as there are {len(teachers)} teachers"
            yield Violation({key: None}, rule, hint="each prompt has one teacher")
        elif times[teacher.key] > 1:
            rule = f"must be the key of one teacher, and {times[teacher.key]} have it: each prompt has one teacher"
            yield Violation({key: teacher.key}, rule, hint="give each teacher another")


def _model_problems(config: RunConfig, name: str, folders: ModelFolders) -> Iterable[Violation]:
    teacher, key = config.distillation.teacher_models[name], f"{GROUP}.{name}"
    path, student = teacher.model_path, config.actor_rollout_ref.model.path
    if path is None:
        rule = f"must be a model folder, or {SELF}, as distillation.enabled=true"
        yield Violation({f"{key}.model_path": None}, rule, {f"{key}.model_path": SELF})
    elif path == SELF and teacher.prompt_key is None:
        rule = (
            f"must be an entry of extra_info with {key}.model_path={SELF}: with the same prompt it is its own teacher"
        )
        yield Violation({f"{key}.prompt_key": None}, rule, hint="such as a prompt with a demonstration")
    elif path != SELF:
        for problem in different_tokens(folders[student], folders[path]):
            rule = f"must have the tokens of the policy, whose distribution over them is compared: {problem}"
            yield Violation({f"{key}.model_path": path}, rule, hint=f"take a model with the tokenizer of {student}")


def _loss_problems(config: RunConfig) -> Iterable[Violation]:
    keys, reads = config.distillation.distillation_loss, distillation_reads(config)
    mode = keys.loss_mode
    if keys.use_policy_gradient and "teacher_log_probs" not in reads:
        rule = f"must be false with {MODE}={mode}: only a loss of the sampled token can be an advantage of that token"
        yield Violation({GRADIENT: True}, rule, {GRADIENT: False})
    if not keys.use_policy_gradient and mode in ("k1", "kl"):
        rule = f"has no gradient that depends on the teacher: with {GRADIENT}=false it would train on noise"
        yield Violation({MODE: mode}, rule, {MODE: "k2"}, f"or set {GRADIENT}=true")
    if keys.temperature is not None and "teacher_hidden" not in reads:
        rule = f"must be null with {MODE}={mode}, which compares log-probs at the temperature of the rollout"
        yield Violation({f"{LOSS}.temperature": keys.temperature}, rule, {f"{LOSS}.temperature": None})
