"""The one check of features against each other: every pair of the table that is on is one violation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.feature_rows import FEATURES
from megatron_rl.planning.features import (
    CPU,
    CUDA,
    ROLE,
    Change,
    Feature,
    Relation,
    Requirement,
    RunFacts,
    Settings,
    Use,
    joined,
)
from megatron_rl.planning.folder_checks import ModelSizes

ALLOW = "trainer.allow_unproven"
DEVICES = {CPU: "no CPU has run it", CUDA: "no GPU has run it"}


def feature_problems(config: RunConfig, models: Sequence[ModelSizes] = ()) -> list[Violation]:
    """Return one violation for each pair of features that is on and does not go together, and for each condition on
    the model, the layout or the device that a feature breaks, in the order of the table.
    """
    run = RunFacts(config, models)
    on = uses_of(run)
    return [problem for row in FEATURES.values() if row.name in on for problem in _problems(run, row, on)]


def uses_of(run: RunFacts) -> dict[str, list[Use]]:
    """Return the names of the features that are on -> their uses."""
    generates = run.config.generates
    found = {row.name: list(row.on(run)) for row in FEATURES.values() if generates or row.in_tasks}
    return {name: uses for name, uses in found.items() if uses}


def unproven(run: RunFacts, on: Iterable[str]) -> list[Feature]:
    """Return the rows of these features that no run on the run's device has shown."""
    return [FEATURES[name] for name in on if run.device not in FEATURES[name].proven]


def _problems(run: RunFacts, row: Feature, on: dict[str, list[Use]]) -> Iterator[Violation]:
    uses = on[row.name]
    for pair in row.needs:
        if pair.when is None or pair.when(run):
            yield from _lacking(run, row, pair, uses, on.get(pair.other, []))
    for pair in row.excludes:
        if pair.other in on and (pair.when is None or pair.when(run)):
            yield from _together(run, row, pair, uses, on[pair.other])
    for condition in (*row.of_model, *row.of_layout):
        yield from _broken(run, row, condition, uses)
    if row.is_refused_on(run.device) and not run.config.trainer.allow_unproven:
        settings = joined(use.settings for use in uses) | {"trainer.device": run.device}
        nearest = joined(use.off for use in uses)
        yield _refusal(row, settings, DEVICES.get(run.device, "it is not proven"), nearest, f"or set {ALLOW}=true")


def _lacking(run: RunFacts, row: Feature, pair: Relation, uses: list[Use], others: list[Use]) -> Iterator[Violation]:
    """A feature that is on without another that it needs."""
    alone = [use for use in uses if not any(_is_of_one(use, other) for other in others)]
    if not alone:
        return
    other = FEATURES[pair.other]
    needed = [use.role if any(ROLE in key for key in other.turned_on) else None for use in alone]
    lacks = {key: run.value(key) for role in needed for key in other.turned_on_for(role)}
    if pair.gives_up:
        nearest = joined(use.off for use in alone)
    elif pair.change is not None:
        nearest = _change(run, pair.change)
    else:
        nearest = {key: value for role in needed for key, value in other.turned_on_for(role).items()}
    yield _refusal(row, joined(use.settings for use in alone) | lacks, pair.why, nearest, pair.hint)


def _together(run: RunFacts, row: Feature, pair: Relation, uses: list[Use], others: list[Use]) -> Iterator[Violation]:
    """Two features that are on, for one role or for the run."""
    both = [(use, other) for use in uses for other in others if _is_of_one(use, other)]
    if both:
        settings = joined(use.settings for use, _ in both) | joined(other.settings for _, other in both)
        nearest = joined(use.off for use, _ in both) if pair.change is None else _change(run, pair.change)
        yield _refusal(row, settings, pair.why, nearest, pair.hint)


def _is_of_one(use: Use, other: Use) -> bool:
    """Whether two uses are of one role, or one of them is of the run."""
    return use.role is None or other.role is None or use.role.name == other.role.name


def _broken(run: RunFacts, row: Feature, condition: Requirement, uses: list[Use]) -> Iterator[Violation]:
    """A condition, once for each reason."""
    reasons: dict[str, list[Use]] = {}
    for use in uses:
        if why := condition.broken(run, use):
            reasons.setdefault(why, []).append(use)
    for why, broken in reasons.items():
        keys = condition.keys or _model_folder
        settings = joined(use.settings for use in broken) | joined(keys(run, use) for use in broken)
        changes: list[Settings] = []
        for use in broken:
            change = condition.change
            changes.append(use.off if change is None else change if isinstance(change, dict) else change(run, use))
        yield _refusal(row, settings, why, joined(changes), condition.hint)


def _model_folder(run: RunFacts, use: Use) -> Settings:
    role = use.role or run.policy
    return {role.model_key: role.model_path}


def _change(run: RunFacts, change: Change) -> Settings:
    return change if isinstance(change, dict) else change(run)


def _refusal(row: Feature, settings: Settings, why: str, nearest: Settings, hint: str = "") -> Violation:
    return Violation(settings, f"do not go together: {why}", nearest, hint, feature=row.name)
