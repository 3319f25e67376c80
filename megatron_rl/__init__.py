"""megatron_rl: a Megatron-backed, 3D-parallel RLHF engine."""

from third_party_patches.megatron_core import without_triton

__version__ = "0.1.0"

without_triton.apply()
