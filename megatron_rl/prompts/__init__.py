"""Prompts: the dataset on disk, as tokens, and the order in which training visits it."""
