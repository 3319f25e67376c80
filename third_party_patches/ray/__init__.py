"""Patches to Ray."""
