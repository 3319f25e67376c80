"""200 configurations with one to four faults each: what preflight says is what was done to them, no more, no less."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fault import Case, base_config, good_case
from fault_catalogue import CATALOGUE, OF_EACH_NUMBER, draw

from megatron_rl.config.schema import RunConfig
from megatron_rl.errors import Violation
from megatron_rl.planning.preflight import preflight

NUMBER = 4 * OF_EACH_NUMBER


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> RunConfig:
    return base_config(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("experts", [False, True])
def test_what_is_broken_was_good(base, tmp_path, experts):
    """Would not catch a rule that is missing."""
    assert preflight(good_case(tmp_path, base, experts).config) == []


def named(violation: Violation) -> tuple[str, ...]:
    return tuple(violation.settings)


@pytest.mark.parametrize("number", range(NUMBER))
def test_every_fault_is_named_and_none_invented(base, tmp_path, number):
    """All at once; and each value that is offered mends its violation and makes no new one.

    Would not catch a rule of which the catalogue knows nothing, nor faults that hide each other.
    """
    experts, faults = draw(number)
    case = good_case(tmp_path, base, experts)
    rng = Random(number)
    expected = [(one, said) for one in faults for said in one.breaks(case, rng)]
    found = preflight(case.config)
    told = "\n".join(map(str, found))
    left = list(found)
    for one, (key, rule) in expected:
        match = next((v for v in left if next(iter(v.settings)) == key and rule in f"{v.subject} {v.rule}"), None)
        assert match is not None, f"{one.name}: no violation of {key} with {rule!r} in\n{told}"
        assert bool(match.nearest) == one.offer, f"{one.name}: {match}"
        left.remove(match)
    assert not left, "\n".join(["invented:", *map(str, left), "of", *(one.name for one in faults)])
    for violation in found:
        if violation.nearest:
            check_offer(case, violation, found)


def check_offer(case: Case, violation: Violation, found: list[Violation]) -> None:
    changed = Case(copy.deepcopy(case.config), case.folder)
    file = None if violation.file is None else Path(violation.file)
    before = None if file is None else file.read_text()
    if file is None:
        changed.set(violation.nearest)
    else:
        file.write_text(json.dumps(json.loads(before) | violation.nearest))
    after = preflight(changed.config)
    if file is not None:
        file.write_text(before)
    assert (named(violation), violation.rule) not in [(named(one), one.rule) for one in after], violation
    new = [str(one) for one in after if named(one) not in [named(old) for old in found]]
    assert not new, f"{violation}\nbreaks {new}"


def test_the_catalogue_is_used_up():
    """Every fault is in some configuration, and there are some of each number. Would not catch a rule without one."""
    drawn = [draw(number)[1] for number in range(NUMBER)]
    assert {one.name for faults in drawn for one in faults} == {one.name for one in CATALOGUE}
    assert [sum(len(faults) == size for faults in drawn) for size in (1, 2, 3, 4)] == [OF_EACH_NUMBER] * 4
    assert len(CATALOGUE) >= 100 and len({one.name for one in CATALOGUE}) == len(CATALOGUE)


def test_a_broken_configuration_costs_seconds_and_no_library(tmp_path):
    """In a process in which torch, Ray, vLLM and Megatron cannot be imported. Would not catch a slow file system."""
    script = (
        "import sys\n"
        "for name in ('torch', 'ray', 'vllm', 'megatron', 'transformers'): sys.modules[name] = None\n"
        "from megatron_rl.cli import main\n"
        "main()\n"
    )
    repository = Path(__file__).parents[2]
    overrides = ["trainer.n_gpus_per_node=7", "data.max_prompt_length=0", "critic.megatron.dtype=float16"]
    command = [sys.executable, "-c", script, "plan", "--json", "--config", "configs/demo_cpu.yaml", *overrides]
    before = os.times()
    finished = subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)
    after = os.times()  # processor time: a busy machine makes no rule slow
    assert after.children_user + after.children_system - before.children_user - before.children_system < 5
    assert finished.returncode == 2, finished.stderr
    keys = {key for violation in json.loads(finished.stdout)["violations"] for key in violation["settings"]}
    assert {"data.max_prompt_length", "critic.megatron.dtype"} <= keys
