"""Rules of single values: the constraints on the schema's fields, and sizes that are absurd whatever a key is for.

Whole numbers stay small enough for lists and other rules that count with them, numbers with a fraction inside of what
float32 holds. Where a key's own bounds are narrower, they decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.constraints import Constraints
from megatron_rl.config.keys import LEAVES, REF, ROLLOUT, default_of, leaves_of, value_of
from megatron_rl.config.megatron import LAYOUT_KEYS
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation

MOST, MOST_SAMPLES = 10**9, 10**7
LARGEST, SMALLEST = 1e15, 1e-30
"""Bounds of the size of floats, except 0: float32 holds LARGEST squared, and 1 / SMALLEST."""
MOST_SECONDS = 1e9
"""Longest time to wait. Python's locks refuse more than 9.2e9."""


def constraint_problems(config: RunConfig) -> Iterator[Violation]:
    """Every value that breaks a constraint of its field, in the order of the schema."""
    judged_by_equality = _shared_layouts(config)
    for key, leaf in leaves_of(config):
        value = value_of(config, key)
        if value is not None and key not in judged_by_equality and not leaf.holds(value):
            yield leaf.violation(key, value, default_of(key), config)


def _shared_layouts(config: RunConfig) -> set[str]:
    """Layout keys of reference and reward models that share the grid of another role, whose values they must have."""
    led: set[str] = set()
    groups = {REF, "reward_model", *(f"reward_models.{name}" for name in config.reward_models)}
    groups |= {f"distillation.teacher_models.{name}" for name in config.distillation.teacher_models}
    for role in roles_of(config):
        if not role.kind.generates and role.pool not in led:
            led.add(role.pool)
            groups.discard(role.key)
    return {f"{group}.megatron.{name}" for group in groups for name in LAYOUT_KEYS}


def magnitude_problems(config: RunConfig) -> Iterator[Violation]:
    """Every number that is absurd by itself, and batches that have too many samples in all."""
    for key, leaf in leaves_of(config):
        value = value_of(config, key) if leaf.is_number else None
        if value is None or not leaf.holds(value):
            continue  # its own constraint reports it
        numbers = value if isinstance(value, list) else [value]
        limits = [_limit(key, leaf, number) for number in numbers]
        if any(limits):
            nearest = [
                number if limit is None else limit.nearest for number, limit in zip(numbers, limits, strict=True)
            ]
            rules = dict.fromkeys(limit.rule for limit in limits if limit is not None)
            rule = f"must be {' and '.join(rules)}"
            yield Violation({key: value}, rule, {key: nearest if isinstance(value, list) else nearest[0]})
    yield from _sample_problems(config)


@dataclass(frozen=True)
class _Limit:
    """A rule that a number breaks, and the nearest number that keeps it."""

    rule: str
    nearest: int | float


def _limit(key: str, leaf: Constraints, value: Any) -> _Limit | None:
    """None for a sensible size, and for infinities and NaN, which constraints refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        has_own = leaf.bounds is not None and math.isfinite(leaf.bounds.high)
        most = leaf.most or MOST
        return _Limit(f"at most {most}", most) if value > most and not has_own else None
    largest = MOST_SECONDS if key.endswith("_s") else LARGEST
    if not math.isfinite(value) or value == 0 or SMALLEST <= abs(value) <= largest:
        return None
    if abs(value) > largest:
        return _Limit(f"at most {largest:g} in size", math.copysign(largest, value))
    return _Limit(f"at least {SMALLEST:g} in size, if it is not 0", math.copysign(SMALLEST, value))


def _sample_problems(config: RunConfig) -> Iterator[Violation]:
    """Responses of one batch, all of which the controller holds."""
    prompts, answers = config.batch_sizes.num_generated_prompts, config.batch_sizes.samples_per_prompt
    key = "data.train_batch_size" if prompts == config.data.train_batch_size else "data.gen_batch_size"
    sizes = {key: prompts, f"{ROLLOUT}.n": answers}
    is_each_sensible = all(1 <= size <= (LEAVES[name].most or MOST) for name, size in sizes.items())
    if is_each_sensible and prompts * answers > MOST_SAMPLES:
        rule = f"are {prompts * answers} samples of a batch, and must be at most {MOST_SAMPLES}"
        yield Violation(sizes, rule, sizes | {key: MOST_SAMPLES // answers})
