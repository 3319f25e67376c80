"""Patches for vLLM."""
