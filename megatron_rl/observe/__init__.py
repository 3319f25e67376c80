"""Metrics, phase times, memory, progress, and the tables and pictures of a run."""
