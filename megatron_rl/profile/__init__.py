"""Measure a machine for the planner: kernels, collectives, passes, an engine, a short run."""
