"""Rules of the keys under `ptx`: files, lengths, and what cannot be mixed into the actor's update."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.config.keys import ACTOR, ROLLOUT
from megatron_rl.config.roles import pretraining_length, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.validate import is_path_or_paths
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.file_rules import pretraining_file_problems
from megatron_rl.ledger.planner.model_folder import ModelSizes

COEF, FILES, LENGTH = "ptx.coef", "ptx.files", "ptx.max_length"
USUAL_COEF = 0.05
"""OpenRLHF's default."""


def pretraining_problems(
    config: RunConfig, models: list[ModelSizes], *, config_only: bool = False
) -> Iterable[Violation]:
    """Every violation. models: as far as they could be read."""
    keys = config.ptx
    if not keys.coef > 0:
        if keys.files is not None:
            rule = f"is of no use with {COEF}={keys.coef:g}: nothing is learned from these files"
            yield Violation({FILES: keys.files}, rule, {COEF: USUAL_COEF})
        return
    if not is_path_or_paths(keys.files):
        rule = f"must be a path or a list of at least one path, as {COEF}={keys.coef:g}"
        yield Violation({FILES: keys.files}, rule, {COEF: 0.0} if keys.files is None else {})
    elif not config_only:
        yield from pretraining_file_problems(config)
    yield from _length_problems(config, models)
    yield from _mixing_problems(config)


def _length_problems(config: RunConfig, models: list[ModelSizes]) -> Iterable[Violation]:
    """Of an example against the model and one pass. What prompts and answers break is said of these alone."""
    longest, data = pretraining_length(config), config.data
    if config.ptx.max_length is None or longest <= data.max_prompt_length + data.max_response_length or longest < 2:
        return
    shared, spec = config.actor_rollout_ref, next(roles_of(config))
    override = shared.model.override_config.max_position_embeddings
    for model in (one for one in models if one.path == shared.model.path):
        told = {} if override is None else {"override_config.max_position_embeddings": override}
        for name, limit in ((told or model.longest) | model.windows).items():
            if longest > limit:
                yield Violation({LENGTH: longest}, f"must be <= {name}({limit}) of {model.path}", {LENGTH: limit})
    one, ranks = spec.update, spec.megatron.context_parallel_size
    tokens = None if one is None else one.max_tokens
    if one is not None and tokens is not None and min(ranks, tokens) >= 1 and tokens * ranks < longest:
        rule = f"must be >= {LENGTH}({longest}){f' / cp({ranks})' if ranks > 1 else ''}"
        yield Violation({one.key: tokens}, rule, {one.key: -(-longest // ranks)})


def _mixing_problems(config: RunConfig) -> Iterable[Violation]:
    shared = config.actor_rollout_ref
    megatron, mode = shared.actor.megatron, f"{ACTOR}.router_replay.mode"
    why = f"with {COEF}={config.ptx.coef:g}: of further examples nobody has said to which experts they go"
    if shared.actor.router_replay.mode != "disabled":
        yield Violation({mode: shared.actor.router_replay.mode}, f"must be disabled {why}", {mode: "disabled"})
    if shared.rollout.enable_rollout_routing_replay:
        key = f"{ROLLOUT}.enable_rollout_routing_replay"
        yield Violation({key: True}, f"must be false {why}", {key: False})
    vpp, key = megatron.virtual_pipeline_model_parallel_size, f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
    if megatron.dynamic_context_parallel and (vpp or 1) > 1:
        rule = f"must be null with {ACTOR}.megatron.dynamic_context_parallel=true and {COEF}={config.ptx.coef:g}"
        yield Violation({key: vpp}, f"{rule}: its passes must all have one shape", {key: None})
