"""Environments and tools that the policy acts in, turn after turn."""
