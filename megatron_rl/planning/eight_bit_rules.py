"""Rules of `rollout.quantization`: blocks of FP8 weights against the cuts of training and generation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megatron_rl.config.keys import ROLLOUT
from megatron_rl.config.problems import divisors, nearest_number
from megatron_rl.config.rollout_keys import FP8, SMALLEST_BLOCK
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.model.families import eight_bit_names, tensors_of
from megatron_rl.parallel.rank_grid import rollout_place
from megatron_rl.parallel.scale_blocks import common_extent
from megatron_rl.parallel.sharding import Place, box_shape, shard_of
from megatron_rl.planning.folder_checks import ModelSizes

KEY, BLOCK = f"{ROLLOUT}.quantization", f"{ROLLOUT}.quantization_block_size"


def quantization_problems(config: RunConfig, models: Sequence[ModelSizes]) -> Iterable[Violation]:
    """Every violation. Constraints report unknown names and small blocks, other rules sizes that do not divide."""
    shared = config.actor_rollout_ref
    if shared.rollout.quantization != FP8:
        return
    model = next((model for model in models if model.path == shared.model.path), None)
    if model is None or model.model is None:
        return
    yield from _block_problems(config, model)


def _block_problems(config: RunConfig, model: ModelSizes) -> Iterable[Violation]:
    """The block against every cut of training and of generation, and against borders of stacked segments."""
    rollout, specs = config.actor_rollout_ref.rollout, model.parts.specs
    block, names = rollout.quantization_block_size, eight_bit_names(specs)
    quantized = [tensor for name, tensor in tensors_of(specs).items() if name in names]
    megatron, generation = config.actor_rollout_ref.actor.megatron, rollout.tensor_model_parallel_size
    tp, etp = megatron.tensor_model_parallel_size, megatron.expert_tensor_parallel_size
    etp = tp if etp is None else etp
    if block < SMALLEST_BLOCK or min(tp, etp, generation, megatron.expert_model_parallel_size) < 1:
        return
    sizes = f"tp({tp})" if etp == tp or not model.num_experts else f"tp({tp}), etp({etp})"
    places = {
        f"training's {sizes}": Place(0, tp, 1, etp_size=etp),
        f"generation's tp({generation})": rollout_place(0, generation, rollout.expert_parallel_size, 1),
    }
    try:
        extent = common_extent(quantized, places.values())
    except ValueError:
        return  # rules of layouts say so
    if extent % block == 0:
        return
    where, segment, shape = next(
        (f"{tensor.name} at {what}", tensor.segments[part.segment].name, box_shape(part.box)[-2:])
        for tensor in quantized
        for what, place in places.items()
        for part in shard_of(tensor, place).parts
        if any(size % block for size in box_shape(part.box)[-2:])
    )
    pieces = " x ".join(map(str, shape))
    rule = f"must divide the pieces of every quantized weight: the {segment} of {where} are {pieces} on a rank"
    fitting = [size for size in divisors(extent) if size >= SMALLEST_BLOCK]
    nearest = {BLOCK: nearest_number(block, fitting)} if fitting else {KEY: None}
    yield Violation({BLOCK: block}, rule, nearest)
