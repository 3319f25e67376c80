"""The section of a plan on `trainer.preset`: keys that it sets, with reasons, and keys that it leaves out. Pure."""

from __future__ import annotations

from megatron_rl.config.keys import value_of
from megatron_rl.config.presets import PRESETS, PresetRow
from megatron_rl.config.roles import roles_of
from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import shown
from megatron_rl.planning.plan_sections import Section


def preset_rows(config: RunConfig) -> tuple[PresetRow, ...]:
    """Return the rows of the run's preset, without those of groups that it does not read."""
    groups = {role.key for role in roles_of(config)} | ({"async_training"} if config.generates else set())
    rows = PRESETS.get(config.trainer.preset or "", ())
    return tuple(row for row in rows if row.key.startswith(tuple(f"{group}." for group in groups)))


def preset_section(config: RunConfig) -> Section:
    """Return a line for each key of the preset, with its reason; without a preset nothing."""
    name = config.trainer.preset
    if name is None:
        return Section()
    left_out = left_out_rows(config)
    sets = [row for row in preset_rows(config) if row.key not in left_out]
    lines = [f"preset {name}: {row.key}={shown(row.value)}: {row.why}" for row in sets]
    json = {"name": name, "sets": {row.key: row.value for row in sets}, "leaves_out": left_out}
    numbers = f"{len(sets)} keys" + (f", {len(left_out)} of its keys left out" if left_out else "")
    row = ("preset", name, f"{numbers}; below")
    return Section([row], json={"preset": json}, notes=[*lines, *left_out_lines(config)])


def left_out_rows(config: RunConfig) -> dict[str, str]:
    """Return key -> reason of the preset's rows that the run does not have: its own value, or a missing condition."""
    rows = [row for row in preset_rows(config) if value_of(config, row.key) != row.value]
    reasons = (row.left_out(lambda key: value_of(config, key)) for row in rows)
    return {
        row.key: reason or f"{shown(value_of(config, row.key))} is set"
        for row, reason in zip(rows, reasons, strict=True)
    }


def left_out_lines(config: RunConfig) -> list[str]:
    """Return a line for each of these rows, as a run and its plan print it."""
    left_out = left_out_rows(config)
    values = {row.key: shown(row.value) for row in preset_rows(config)}
    return [f"preset {config.trainer.preset} without {key}={values[key]}: {why}" for key, why in left_out.items()]
