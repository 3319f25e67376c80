"""How large or small any number of a configuration may be, whatever it is for; a number beyond is a typing error.

Whole numbers stay small enough for lists and other rules that count with them, numbers with a fraction inside of what
float32 holds. Where a key's own interval (`value_tables`) is narrower, that one decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.keys import value_of
from megatron_rl.config.load import KEYS, NAMED_GROUPS
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.value_tables import ACTOR, CRITIC, OPTIONS, RANGES, RANGES_OR_NULL, ROLLOUT
from megatron_rl.errors import Violation

MOST = 10**9
MOST_PROMPTS, MOST_SAMPLES = 10**6, 10**7
LARGEST, SMALLEST = 1e15, 1e-30
"""Of numbers with a fraction, but for 0: float32 holds the square of the one, and 1 / the other."""
MOST_SECONDS = 1e9
"""To wait: beyond 9.2e9 Python's locks refuse."""

MEGATRON = tuple(options.rpartition(".")[0] for options in OPTIONS)
MOST_OF: dict[str, int] = {
    "data.train_batch_size": MOST_PROMPTS,
    "data.gen_batch_size": MOST_PROMPTS,
    "ptx.mini_batch_size": MOST_PROMPTS,
    f"{ACTOR}.ppo_mini_batch_size": MOST_PROMPTS,
    f"{CRITIC}.ppo_mini_batch_size": MOST_PROMPTS,
    "data.seed": 2**63 - 1,
    f"{ROLLOUT}.n": 10**5,
    f"{ROLLOUT}.val_kwargs.n": 10**5,
    f"{ROLLOUT}.max_num_seqs": 2**20,
    f"{ROLLOUT}.max_num_batched_tokens": 2**24,
    f"{ROLLOUT}.kv_cache_memory_bytes": 2**50,
    f"{ACTOR}.ppo_epochs": 1000,
    f"{CRITIC}.ppo_epochs": 1000,
    "reward_model.num_workers": 4096,
    "trainer.rollout_ahead": 1000,
    "trainer.seed": 2**63 - 1,
    **{f"{megatron}.make_vocab_size_divisible_by": 2**20 for megatron in MEGATRON},
    **{f"{megatron}.override_ddp_config.bucket_size": 2**50 for megatron in MEGATRON},
}
"""Whole numbers that may be more or must be less than MOST: what lies in memory or in processes at once."""


INTERVALS = RANGES | RANGES_OR_NULL


def _numeric(kinds: Mapping[str, Any]) -> list[str]:
    return [key for key, kind in kinds.items() if "int" in str(kind) or "float" in str(kind)]


NUMERIC = _numeric(KEYS)
OF_GROUPS = {top: _numeric(kinds) for top, kinds in NAMED_GROUPS.items()}
"""Keys whose type lets them hold a number; of the groups that the user names by their top-level key."""


def magnitude_problems(config: RunConfig) -> Iterator[Violation]:
    """Every number that is absurd by itself, and batches that have too many samples in all."""
    for key in _keys(config):
        value = value_of(config, key)
        interval = INTERVALS.get(key)
        if interval is not None and value is not None and not interval.holds(value):
            continue
        numbers = value if isinstance(value, list) else [value]
        broken = [_broken(key, number) for number in numbers]
        if any(broken):
            nearest = [
                number if limit is None else limit.nearest for number, limit in zip(numbers, broken, strict=True)
            ]
            rules = dict.fromkeys(limit.rule for limit in broken if limit is not None)
            rule = f"must be {' and '.join(rules)}"
            yield Violation({key: value}, rule, {key: nearest if isinstance(value, list) else nearest[0]})
    yield from _sample_problems(config)


def _keys(config: RunConfig) -> Iterable[str]:
    """All keys that may hold numbers, those of the groups that the user named too."""
    groups = [(f"{top}.{name}", keys) for top, keys in OF_GROUPS.items() for name in value_of(config, top)]
    return [*NUMERIC, *(f"{group}.{key}" for group, keys in groups for key in keys)]


@dataclass(frozen=True)
class _Limit:
    """What a number does not keep, and the nearest one that does."""

    rule: str
    nearest: int | float


def _broken(key: str, value: Any) -> _Limit | None:
    """None for a sensible size; for infinities and NaN too, which rules of their own refuse."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, int):
        most = MOST_OF.get(key, MOST)
        return _Limit(f"at most {most}", most) if value > most else None
    largest = MOST_SECONDS if key.endswith("_s") else LARGEST
    if not math.isfinite(value) or value == 0 or SMALLEST <= abs(value) <= largest:
        return None
    if abs(value) > largest:
        return _Limit(f"at most {largest:g} in size", math.copysign(largest, value))
    return _Limit(f"at least {SMALLEST:g} in size, if it is not 0", math.copysign(SMALLEST, value))


def _sample_problems(config: RunConfig) -> Iterator[Violation]:
    """Answers of one batch, which the controller holds at once."""
    prompts, answers = config.data.gen_batch_size, config.actor_rollout_ref.rollout.n
    key = "data.train_batch_size" if prompts == config.data.train_batch_size else "data.gen_batch_size"
    if 1 <= prompts <= MOST_PROMPTS and 1 <= answers <= MOST_OF[f"{ROLLOUT}.n"] and prompts * answers > MOST_SAMPLES:
        rule = f"are {prompts * answers} samples of a batch, and must be at most {MOST_SAMPLES}"
        nearest = {key: MOST_SAMPLES // answers, f"{ROLLOUT}.n": answers}
        yield Violation({key: prompts, f"{ROLLOUT}.n": answers}, rule, nearest)
