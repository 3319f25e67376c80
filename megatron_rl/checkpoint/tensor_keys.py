"""Under which names a role's tensors are saved: names that no layout decides.

A key is the Hugging Face name of the tensor (of experts: without their number, all of a layer stacked in dim 0); the
optimizer's are prefixed as Megatron does it. Shapes are those of whole tensors, without padding. So a checkpoint of one
layout is read in any other, and a weight is found by its name by whoever has no layout at all.
"""

from __future__ import annotations

from megatron_rl.model.families import ParamSpec

WEIGHT = "weight"
"""The kind of the parameters themselves; other kinds are the optimizer's names for its state."""
BIAS = "expert_bias"
"""The kind of what experts are chosen by beside their scores, where training has moved it."""
OPTIMIZER_PREFIX = "optimizer.state."


def checkpoint_key(spec: ParamSpec, segment: int, kind: str = WEIGHT) -> str:
    """The name of a segment, or of the optimizer's state for it, in a checkpoint."""
    name = spec.hf_names[segment].replace("{expert}.", "")
    return name if kind == WEIGHT else f"{OPTIMIZER_PREFIX}{kind}.{name}"
