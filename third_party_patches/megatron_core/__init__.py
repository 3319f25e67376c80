"""Patches for megatron-core."""
