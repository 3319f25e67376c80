"""Rows of Megatron's options: kernels, FP8, recomputation, context parallelism, tries, gradients in buckets."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.config.keys import ACTOR
from megatron_rl.config.megatron import (
    ADAM,
    FP8_FORMATS,
    FUSED_KERNELS,
    LOCAL,
    MUON,
    PLAIN_KERNELS,
    TE_LINEAR,
    TRANSFORMER_ENGINE,
)
from megatron_rl.config.roles import PassSpec
from megatron_rl.planning.feature_rows.adapter_rows import lora_key
from megatron_rl.planning.features import (
    ROLE,
    Feature,
    Relation,
    Requirement,
    RunFacts,
    Settings,
    Use,
    equals,
    of_roles,
    where,
)

GROUP = "megatron.override_transformer_config"
DDP = "megatron.override_ddp_config"
KERNELS = "megatron.attention_kernels"
IMPLEMENTATION, FP8, EMULATE = f"{GROUP}.transformer_impl", f"{GROUP}.fp8", "megatron.fp8_emulate"
RECOMPUTE, FUSION = f"{GROUP}.recompute_granularity", f"{GROUP}.gradient_accumulation_fusion"
CP, DYNAMIC, WAY = "megatron.context_parallel_size", "megatron.dynamic_context_parallel", f"{GROUP}.cp_comm_type"
OVERLAP, GATHER, BUCKET = (f"{DDP}.{name}" for name in ("overlap_grad_reduce", "overlap_param_gather", "bucket_size"))
OPTIMIZER, OVERRIDE = "optim.optimizer", "optim.override_optimizer_config"
HOST = f"{OVERRIDE}.optimizer_cpu_offload"
TREE = "actor_rollout_ref.model.enable_tree_training"
OFFLOAD = f"{ACTOR}.megatron.param_offload"


def _key(use: Use, name: str) -> str:
    assert use.role is not None  # features of roles have one
    return f"{use.role.key}.{name}"


def _adapted_norms(run: RunFacts, use: Use) -> str:
    role = use.role
    if role is None or not role.lora.rank or TRANSFORMER_ENGINE not in use.settings.values():
        return ""
    return "adapters read the norm's output, and transformer-engine computes norm and linear at once"


def _fp8(run: RunFacts) -> Iterator[Use]:
    for role in run.megatron_roles:
        options = role.megatron.override_transformer_config
        if options.fp8 in FP8_FORMATS:
            emulates = {f"{role.key}.{EMULATE}": False} if role.megatron.fp8_emulate else {}
            yield Use({f"{role.key}.{FP8}": options.fp8}, {f"{role.key}.{FP8}": None} | emulates, role)


def _in_blocks(run: RunFacts, use: Use) -> str:
    """Why the role's sinks or soft caps are computed block by block, in tiles of products."""
    role = use.role
    model = None if role is None else run.model_of(role)
    if role is None or model is None or not any(kind.in_tiles for kind in model.parts.attentions):
        return ""
    ways = {"context parallelism": _is_shared(use), "a prefix tree": any(spec.as_tree for spec in role.passes)}
    why = " and ".join(way for way, is_used in ways.items() if is_used)
    return f"with {why}, attention meets keys block by block, for which these kernels are not used" if why else ""


def _wide(run: RunFacts, use: Use) -> str:
    dtype = "" if use.role is None else use.role.megatron.dtype
    return f"they round products of {dtype} to fewer digits" if dtype == "float32" else ""


def _dtype(run: RunFacts, use: Use) -> Settings:
    return {_key(use, "megatron.dtype"): run.value(_key(use, "megatron.dtype"))}


def _trees(run: RunFacts) -> Iterator[Use]:
    for role in run.roles:
        if any(spec.as_tree for spec in role.passes):
            yield Use({TREE: True}, {TREE: False}, role)


def _padded(use: Use) -> list[str]:
    role = use.role
    is_padded = role is not None and any(not spec.remove_padding for spec in role.passes)
    return [f"{role.model_key.rpartition('.')[0]}.use_remove_padding"] if role is not None and is_padded else []


def _switch_of(spec: PassSpec) -> str:
    """The key that joins samples of a pass by their tokens."""
    group, _, name = spec.key.rpartition(".")
    return f"{group}.log_prob_use_dynamic_bsz" if name.startswith("log_prob") else f"{group}.use_dynamic_bsz"


def _by_rows(use: Use) -> list[str]:
    """The keys that fill passes of a role by tokens, where they are false."""
    passes = [] if use.role is None else use.role.passes
    return list(dict.fromkeys(_switch_of(spec) for spec in passes if spec.max_tokens is None))


def _on_host(run: RunFacts, use: Use) -> str:
    role = use.role
    is_offloaded = role is not None and role.settings.optim.override_optimizer_config.optimizer_cpu_offload
    return "Muon needs whole matrices, which the host's copies of shards do not make" if is_offloaded else ""


def _is_shared(use: Use) -> bool:
    """Whether ranks share the sequences of a role."""
    return use.role is not None and use.role.megatron.context_parallel_size > 1


ROWS = (
    Feature(
        "transformer_engine",
        "transformer-engine's linear layers",
        {f"{ROLE}.{IMPLEMENTATION}": TE_LINEAR},
        of_roles(IMPLEMENTATION, LOCAL, equals(TE_LINEAR, TRANSFORMER_ENGINE)),
        excludes=(Relation("cpu", "transformer-engine computes on GPUs alone"),),
        of_layout=(
            Requirement(
                "te_linear with LoRA adapters",
                _adapted_norms,
                lambda run, use: {_key(use, IMPLEMENTATION): TE_LINEAR},
                keys=lambda run, use: {} if use.role is None else {f"{lora_key(use.role)}.rank": use.role.lora.rank},
            ),
        ),
        proven=(),
        in_tasks=True,
    ),
    Feature(
        "fused_attention",
        "fused kernels of sinks, soft caps and gated deltas",
        {f"{ROLE}.{KERNELS}": FUSED_KERNELS},
        of_roles(KERNELS, PLAIN_KERNELS, equals(FUSED_KERNELS)),
        excludes=(Relation("cpu", "these kernels compute gradients on GPUs alone"),),
        of_layout=(
            Requirement("16 bits", _wide, lambda run, use: {_key(use, "megatron.dtype"): "bfloat16"}, keys=_dtype),
            Requirement("sinks and soft caps without context parallelism or prefix trees", _in_blocks),
        ),
        proven=(),
        in_tasks=True,
    ),
    Feature(
        "fp8_emulation",
        "emulated FP8 training",
        {f"{ROLE}.{EMULATE}": True},
        of_roles(EMULATE),
        needs=(Relation("fp8_training", "there are no FP8 products to emulate", gives_up=True),),
        excludes=(Relation("gpu", "GPUs compute in FP8"),),
        in_tasks=True,
    ),
    Feature(
        "fp8_training",
        "FP8 training",
        {f"{ROLE}.{FP8}": "hybrid"},
        _fp8,
        needs=(
            Relation(
                "fp8_emulation",
                "CPUs have no FP8 products",
                hint=f"or set {ACTOR}.megatron.fp8_emulate=true, which rounds as FP8 does and is slow",
                gives_up=True,
                when=lambda run: run.on_cpu,
            ),
            Relation("transformer_engine", "FP8 products are transformer-engine's", when=lambda run: not run.on_cpu),
        ),
        in_tasks=True,
    ),
    Feature(
        "muon",
        "Muon",
        {f"{ROLE}.{OPTIMIZER}": MUON},
        of_roles(OPTIMIZER, ADAM, equals(MUON), trained=True),
        excludes=(Relation("lora", "adapters are no matrices of layers, so Adam would update all"),),
        of_layout=(
            Requirement(
                "optimizer_cpu_offload=false",
                _on_host,
                lambda run, use: {_key(use, HOST): False},
                keys=lambda run, use: {_key(use, HOST): True},
            ),
        ),
        in_tasks=True,
    ),
    Feature(
        "recomputation",
        "recomputed activations",
        {f"{ROLE}.{RECOMPUTE}": "selective"},
        of_roles(RECOMPUTE, None),
        in_tasks=True,
    ),
    Feature(
        "fused_accumulation",
        "fused weight gradients",
        {f"{ROLE}.{FUSION}": True},
        of_roles(FUSION),
        in_tasks=True,
    ),
    Feature(
        "context_parallel",
        "context parallelism",
        {f"{ROLE}.{CP}": 2},
        of_roles(CP, 1, lambda size: size > 1),
        in_tasks=True,
    ),
    Feature(
        "prefix_tree",
        "rows that share prefixes in training",
        {TREE: True},
        _trees,
        of_layout=(
            Requirement(
                "use_remove_padding=true",
                lambda run, use: "rows that are filled up share nothing" if _padded(use) else "",
                lambda run, use: dict.fromkeys(_padded(use), True),
                keys=lambda run, use: dict.fromkeys(_padded(use), False),
            ),
        ),
        in_tasks=True,
    ),
    Feature(
        "all_to_all",
        "context parallelism by all-to-all",
        {f"{ROLE}.{WAY}": "a2a"},
        of_roles(WAY, "p2p", equals("a2a")),
        in_tasks=True,
    ),
    Feature(
        "dynamic_context_parallel",
        "dynamic context parallelism",
        {f"{ROLE}.{DYNAMIC}": True},
        of_roles(DYNAMIC),
        needs=(
            Relation(
                "context_parallel",
                "context_parallel_size is the most ranks that share a sequence: in verl, all DP x CP ranks",
                gives_up=True,
            ),
        ),
        of_layout=(
            Requirement(
                "use_remove_padding=true",
                lambda run, use: (
                    "rows that are filled up to the longest are all as long as it is"
                    if _is_shared(use) and _padded(use)
                    else ""
                ),
                lambda run, use: dict.fromkeys(_padded(use), True),
                keys=lambda run, use: dict.fromkeys(_padded(use), False),
            ),
            Requirement(
                "use_dynamic_bsz=true",
                lambda run, use: (
                    "the tokens of a pass determine over how many ranks it is split"
                    if _is_shared(use) and _by_rows(use)
                    else ""
                ),
                lambda run, use: dict.fromkeys(_by_rows(use), True),
                keys=lambda run, use: dict.fromkeys(_by_rows(use), False),
            ),
        ),
        in_tasks=True,
    ),
    Feature(
        "overlapped_gradients",
        "gradient reduction during the backward pass",
        {f"{ROLE}.{OVERLAP}": True},
        of_roles(OVERLAP, trained=True),
        in_tasks=True,
    ),
    Feature(
        "overlapped_parameters",
        "parameters gathered during the forward pass",
        {f"{ROLE}.{GATHER}": True},
        of_roles(GATHER, trained=True),
        needs=(Relation("overlapped_gradients", "without it there is one bucket to wait for"),),
        in_tasks=True,
    ),
    Feature(
        "gradient_buckets",
        "gradient buckets of a given size",
        {f"{ROLE}.{BUCKET}": 1_000_000},
        of_roles(BUCKET, None, lambda size: size is not None and size >= 1, trained=True),
        needs=(Relation("overlapped_gradients", "without it all gradients are one bucket"),),
        in_tasks=True,
    ),
    Feature(
        "parameter_offload",
        "the actor's parameters in host memory",
        {OFFLOAD: True},
        where(OFFLOAD),
        needs=(
            Relation(
                "own_pool",
                "generation reads the actor's parameters",
                hint="actor_rollout_ref.rollout.drop_train_weights=true saves memory: rollout TP below training TP",
                gives_up=True,
            ),
        ),
    ),
)
