"""Drafts: what is refused before anything starts, word for word."""

from __future__ import annotations

import importlib.util

import pytest
from model_folders import problems

ROLLOUT = "actor_rollout_ref.rollout"
KEY = f"{ROLLOUT}.speculative"


@pytest.fixture
def drafted(config):
    config.actor_rollout_ref.rollout.speculative = "ngram"
    return config


@pytest.mark.parametrize("way", ["ngram", "earlier"])
def test_drafts_pass(drafted, way):
    """Also beside answers of several turns and generation that runs ahead. Would not catch what vLLM refuses."""
    drafted.actor_rollout_ref.rollout.speculative = way
    assert problems(drafted) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"speculative": "later"},
            f"{KEY}=later must be one of ngram, earlier, mtp; did you mean: earlier",
        ),
        (
            {"speculative": "earlier", "earlier_answers_per_prompt": 0},
            f"{ROLLOUT}.earlier_answers_per_prompt=0 must be >= 1; try: 1",
        ),
        (
            {"prompt_lookup_min": 5, "prompt_lookup_max": 3},
            f"{ROLLOUT}.prompt_lookup_min=5 must be <= prompt_lookup_max(3); try: 3",
        ),
        (
            {"num_speculative_tokens": 0},
            f"{ROLLOUT}.num_speculative_tokens=0 must be >= 1; try: 1",
        ),
        (
            {"speculative_disable_by_batch_size": 0},
            f"{ROLLOUT}.speculative_disable_by_batch_size=0 must be null (never) or >= 1; try: null",
        ),
    ],
)
def test_wrong_keys(drafted, change, expected):
    """Word for word. Would not catch a bound that vLLM has and the rule lacks."""
    for name, value in change.items():
        setattr(drafted.actor_rollout_ref.rollout, name, value)
    assert problems(drafted) == [expected]


@pytest.mark.parametrize("way", ["ngram", "earlier"])
def test_the_search_needs_its_compiler(drafted, monkeypatch, way):
    """Would not catch a package that is there and broken."""
    drafted.actor_rollout_ref.rollout.speculative = way
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "numba" else found(name, *more)
    )
    assert problems(drafted) == [
        f"{KEY}={way} needs numba, which is not installed: pip install numba==0.65.0; try: null"
    ]
