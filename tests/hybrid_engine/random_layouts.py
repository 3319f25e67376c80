"""Small random models with two layouts that fit them, for property tests of plans and schedules."""

from __future__ import annotations

import math

from hypothesis import assume
from hypothesis import strategies as st

from megatron_rl.model.families import ModelShape
from megatron_rl.parallel.rank_grid import RolloutGrid, TrainGrid
from megatron_rl.parallel.stages import StagePlan


@st.composite
def cases(draw):
    """A small model and two layouts that fit it; options: keywords of `plan_for`."""
    is_moe = draw(st.booleans())
    tp, pp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 4]))
    etp, ep = draw(st.sampled_from([1, 2, 4])) if is_moe else tp, draw(st.sampled_from([1, 2, 4])) if is_moe else 1
    assume(tp * dp % (etp * ep) == 0)
    grid = TrainGrid(tp * pp * dp, tp, pp, ep_size=ep, etp_size=etp)
    rollout_tp = draw(st.sampled_from([size for size in (1, 2, 3, 4, 8) if grid.world_size % size == 0]))
    rollout_ep = draw(st.sampled_from([1, rollout_tp])) if is_moe and rollout_tp in (1, 2, 4) else 1
    kv_heads = math.lcm(tp, draw(st.sampled_from([1, 2, rollout_tp])))
    assume(kv_heads % rollout_tp == 0 or rollout_tp % kv_heads == 0)
    heads = math.lcm(kv_heads, rollout_tp) * draw(st.integers(1, 2))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    uneven = vpp == 1 and pp > 1 and draw(st.booleans())
    layers = pp * vpp * draw(st.integers(1, 2)) + (1 if uneven else 0)
    stages = StagePlan(layers, pp, vpp, first=layers // pp + 1 if uneven else None)
    multiple = math.lcm(tp, draw(st.sampled_from([12, 64])))
    assume(64 % tp == 0 and 64 % rollout_tp == 0)
    shape = ModelShape(
        num_layers=layers,
        hidden_size=draw(st.sampled_from([3, 8])),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=draw(st.integers(1, 3)),
        ffn_size=math.lcm(tp, etp, rollout_tp),
        vocab_size=draw(st.integers(1, 90)),
        tied=draw(st.booleans()),
        num_experts=4 if is_moe else 0,
    )
    architecture = "Qwen3MoeForCausalLM" if is_moe else draw(st.sampled_from(["LlamaForCausalLM", "Qwen2ForCausalLM"]))
    options = {"train_multiple": multiple, "per_node": draw(st.sampled_from([2, 4, 64])), "share": draw(st.booleans())}
    return shape, architecture, RolloutGrid(grid, rollout_tp, rollout_ep), stages, options
