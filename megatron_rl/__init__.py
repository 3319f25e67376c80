"""megatron_rl: a Megatron-backed, 3D-parallel RLHF engine."""

__version__ = "0.1.0"
