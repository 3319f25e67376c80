"""A role of a kind that the package does not have: its row is all that plan, time and map need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from placing import request, write_model

from megatron_rl.config import roles
from megatron_rl.config.role_kinds import KINDS, Head, RoleKind, StartsFrom
from megatron_rl.config.roles import PassCall, PassSpec, Placement, RoleSpec
from megatron_rl.config.schema import RunConfig
from megatron_rl.planning.layout_search.search_result import find_placements
from megatron_rl.planning.memory import phase_order, planned_memory

GRADER = RoleKind("grader", scored=0, updated=9, head=Head.VALUE, starts_from=StartsFrom.EITHER)


def grader(config: RunConfig) -> Iterator[RoleSpec]:
    """A grader with the settings of a critic that the run does not have."""
    keys, packed = config.critic, config.critic.model.use_remove_padding
    scored, updated = "forward_micro_batch_size_per_gpu", "ppo_micro_batch_size_per_gpu"
    score = PassSpec("grader", PassCall("graded"), getattr(keys, scored), None, packed, f"critic.{scored}")
    update = PassSpec("update_grader", PassCall("taught"), getattr(keys, updated), None, packed, f"critic.{updated}")
    row = (GRADER, "critic", keys.pool, keys.model.path, "critic.model.path", keys.megatron, keys)
    yield RoleSpec("grader", *row, score=score, update=update)


def test_a_new_kind_is_in_plan_time_and_map(tmp_path, monkeypatch):
    """Its score first and its update last, as its places say. Would not catch a wrong number of bytes or seconds."""
    monkeypatch.setattr(roles, "ROWS", [*roles.ROWS, grader])
    model = write_model(tmp_path / "model")
    best = find_placements(request(tmp_path, 2, "algorithm.adv_estimator=grpo", model=model)).candidates[0]
    assert [phase for phase in best.time.seconds if "grader" in phase] == ["grader", "update_grader"]
    config = best.config
    memory = planned_memory(config)[Placement.of(config).roles["grader"].pool]
    assert list(memory)[-2:] == ["update_grader", "save"] and "grader parameters" in memory["grader"]


def test_two_passes_are_no_phase(tmp_path, monkeypatch):
    """Two graders. Would not catch the name of a phase outside of roles, such as gen."""
    second = [lambda config: [replace(role, name="second") for role in grader(config)]]
    monkeypatch.setattr(roles, "ROWS", [*roles.ROWS, grader, *second])
    config = request(tmp_path, 2).config
    with pytest.raises(ValueError, match="grader, update_grader: the phase of two passes"):
        Placement.of(config)


def test_phases_have_the_order_of_a_step():
    """As a step runs them. Would not catch another order of the calls themselves."""
    score = PassSpec("", PassCall(""), 1, None, True, "")
    built = ["actor", "reference", "critic", "reward_model", "teacher"]
    rows = [
        RoleSpec(name, KINDS[name], "", "", "", "", None, None, replace(score, phase=name))  # type: ignore[arg-type]
        for name in built
    ]
    rows = [
        replace(row, update=replace(score, phase=f"update {row.name}")) if row.kind.updated else row for row in rows
    ]
    scores, updates = ["reward_model", "teacher", "actor", "reference", "critic"], ["update critic", "update actor"]
    assert phase_order(rows)[5:-1] == [*scores, *updates]


def test_a_pass_without_a_place_is_an_error():
    """A kind that states no place for an update has none. Would not catch a wrong place."""
    frozen = replace(GRADER, updated=None)
    cut = PassSpec("grader", PassCall("graded"), 1, None, True, "")
    with pytest.raises(ValueError, match="role grader has a pass update; kind grader has no place for it"):
        RoleSpec("grader", frozen, "", "", "", "", None, None, update=cut)  # type: ignore[arg-type]
