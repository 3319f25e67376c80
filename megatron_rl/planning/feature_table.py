"""The table of features as text and as data: needs, exclusions with their reasons, and devices that have shown them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import shown
from megatron_rl.planning.feature_checks import ALLOW, unproven, uses_of
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.features import Feature, RunFacts

WIDTH = 100
RUN_ON = {"cpu": "CPUs", "cuda": "GPUs"}


def partners(row: Feature) -> dict[str, str]:
    """Return the names of the features that a feature does not go with -> the reason, those of other rows too."""
    own = {pair.other: pair.why for pair in row.excludes}
    others = {other.name: pair.why for other in FEATURES.values() for pair in other.excludes if pair.other == row.name}
    return own | others


def keys_of(row: Feature) -> str:
    """Return the keys and values that turn a feature on."""
    return " ".join(f"{key}={shown(value)}" for key, value in row.turned_on.items())


def conditions(row: Feature) -> list[str]:
    """Return the needs of a feature: other features with the reason, and conditions on model and layout."""
    needs = [f"{FEATURES[pair.other].text}: {pair.why}" for pair in row.needs]
    return needs + [condition.text for condition in (*row.of_model, *row.of_layout)]


def proof(row: Feature) -> str:
    """Return where runs have shown a feature, and where it is refused."""
    if "trainer.device" in row.turned_on:
        return "-"
    text = f"run on {' and '.join(RUN_ON[device] for device in row.proven)}" if row.proven else "not run yet"
    return f"{text}; elsewhere refused without {ALLOW}=true" if row.refused_unproven else text


def feature_lines(rows: Iterable[Feature], only: Iterable[str] | None = None) -> Iterator[str]:
    """Yield lines of at most WIDTH columns. only: names of the features whose pairs count; None: all."""
    wanted = None if only is None else set(only)
    for row in rows:
        shown_on = proof(row)
        yield from _wrapped(f"{row.text}: {keys_of(row)}" + (f" ({shown_on})" if shown_on != "-" else ""), "")
        for needed in conditions(row):
            yield from _wrapped(f"needs {needed}", "    ")
        for name, why in partners(row).items():
            if wanted is None or name not in wanted:
                yield from _wrapped(f"does not go with {FEATURES[name].text}: {why}", "    ")


def _wrapped(text: str, indent: str) -> list[str]:
    further = f"{indent}    "
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=further, break_long_words=False, break_on_hyphens=False
    )


def as_json(rows: Iterable[Feature]) -> list[dict[str, Any]]:
    """Return rows as data."""
    return [
        {
            "name": row.name,
            "text": row.text,
            "turned_on": row.turned_on,
            "needs": {pair.other: pair.why for pair in row.needs},
            "excludes": partners(row),
            "of_model": [condition.text for condition in row.of_model],
            "of_layout": [condition.text for condition in row.of_layout],
            "proven": list(row.proven),
            "refused_unproven": row.refused_unproven,
        }
        for row in rows
    ]


def features_on(config: RunConfig) -> list[Feature]:
    """Return the rows of the features that are on. Conditions on a model are not looked at."""
    return [FEATURES[name] for name in uses_of(RunFacts(config))]


def unproven_notes(config: RunConfig) -> list[str]:
    """Return one line with the features that no run on such a device has shown; none where all are shown."""
    run = RunFacts(config)
    rows = unproven(run, uses_of(run))
    where = RUN_ON[config.trainer.device]
    return [f"not yet run on {where}: {', '.join(row.text for row in rows)}"] if rows else []
