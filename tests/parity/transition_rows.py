"""Transitions: one row is one layout and one model. transition_cases.py says which of them `make test` has."""

from __future__ import annotations

from scenarios import Row, Scenario
from transition_cases import CASES, Case, when_of
from transition_observations import Transition


def row(case: Case) -> Row:
    ranks = (case.world_size, case.tp, case.pp)
    return Row(Scenario(case.save, case.name, ranks, changes=case.model), Transition(case), tuple(when_of(case)))


TRANSITIONS = tuple(row(case) for case in CASES)
