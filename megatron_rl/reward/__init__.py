"""Rewards: a score for each answer."""
