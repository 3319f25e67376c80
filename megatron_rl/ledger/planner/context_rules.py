"""Whether the way in which attention reaches the keys of other context-parallel ranks fits the models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.problems import divisors, nearest_name, nearest_number
from megatron_rl.config.roles import ROLLOUT, PassSpec, RoleSpec, roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.ledger.planner.model_folder import ModelSizes

DYNAMIC = "dynamic_context_parallel"
WAYS = ("p2p", "all_gather", "a2a")


def context_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Of all roles that the run has."""
    for role in roles_of(config):
        if role.kind != ROLLOUT:
            model = next((model for model in models if model.path == role.model_path), None)
            yield from _role_problems(role, model)
    yield from _dynamic_problems(config)


def _role_problems(role: RoleSpec, model: ModelSizes | None) -> Iterable[Violation]:
    megatron = role.megatron
    how, key = megatron.override_transformer_config.cp_comm_type, f"{role.key}.megatron.override_transformer_config"
    key = f"{key}.cp_comm_type"
    if how not in WAYS:
        yield Violation({key: how}, f"must be one of {', '.join(WAYS)}", {key: nearest_name(str(how), WAYS)})
    cp_size, tp_size = megatron.context_parallel_size, megatron.tensor_model_parallel_size
    whole = None if model is None else _what_is_not_cut(model)
    if model is not None and whole and cp_size > 1:
        size_key = f"{role.key}.megatron.context_parallel_size"
        rule = f"must be 1: {whole}, as of {model.path}, is not cut over context-parallel ranks"
        yield Violation({size_key: cp_size}, rule, {size_key: 1})
        return
    if how != "a2a" or model is None or min(cp_size, tp_size) < 1 or model.num_attention_heads % tp_size:
        return
    heads = model.num_attention_heads // tp_size
    if heads % cp_size:
        subject = f"cp_comm_type=a2a with cp({cp_size})"
        rule = (
            "needs CP to divide the query heads of a TP rank, "
            f"num_attention_heads({model.num_attention_heads}) / tp({tp_size}) = {heads}, of {model.path}"
        )
        fitting = ", ".join(map(str, divisors(heads)))
        hint = f"a2a goes with context_parallel_size of {fitting}"
        yield Violation({key: how}, rule, {key: "p2p"}, hint, subject=subject)


def _what_is_not_cut(model: ModelSizes) -> str | None:
    """The kind of attention for which every rank needs whole sequences; None where a model has another."""
    if model.latent is not None:
        return "latent attention"
    if model.attention is None or model.attention.is_whole:
        return None
    return "attention with windows or bounded products"


def _dynamic_problems(config: RunConfig) -> Iterable[Violation]:
    """What passes need that choose over how many ranks their sequences are cut."""
    packed, by_tokens = dict[str, bool](), dict[str, bool]()
    for role in (role for role in roles_of(config) if role.kind != ROLLOUT):
        megatron, cp_size = role.megatron, role.megatron.context_parallel_size
        if not megatron.dynamic_context_parallel or cp_size < 1:
            continue
        if cp_size == 1:
            own, key = f"{role.key}.megatron.{DYNAMIC}", f"{role.key}.megatron.context_parallel_size"
            hint = f"{key} is the most ranks that share a sequence: in verl, all DP x CP ranks"
            yield Violation({own: True}, f"needs {key} above 1", {own: False}, hint)
            continue
        if cp_size & (cp_size - 1):
            key = f"{role.key}.megatron.context_parallel_size"
            powers = [1 << power for power in range(1, cp_size.bit_length() + 1)]
            rule = f"must be a power of two with {DYNAMIC}=true: passes take 1, 2, 4 ... of so many ranks"
            yield Violation({key: cp_size}, rule, {key: nearest_number(cp_size, powers)})
        packed |= {f"{role.model_key.rpartition('.')[0]}.use_remove_padding": one.remove_padding for one in role.passes}
        by_tokens |= {switch_of(one): one.max_tokens is not None for one in role.passes}
    for keys, why in (
        (packed, "rows that are filled up to the longest are all as long as it is"),
        (by_tokens, "the tokens of a pass say over how many ranks it goes"),
    ):
        for key in (key for key, is_set in keys.items() if not is_set):
            yield Violation({key: False}, f"must be true with {DYNAMIC}=true: {why}", {key: True})


def switch_of(one: PassSpec) -> str:
    """The key that says whether a pass is cut by tokens."""
    group, _, name = one.key.rpartition(".")
    return f"{group}.log_prob_use_dynamic_bsz" if name.startswith("log_prob") else f"{group}.use_dynamic_bsz"
