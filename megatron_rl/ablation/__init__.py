"""Ablations: one run for each point of a grid of layouts and options, each judged by what it recorded, one report."""
