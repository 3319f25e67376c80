"""Megatron GPT and its value head, the HF name and layout maps, attention and log-probabilities."""
