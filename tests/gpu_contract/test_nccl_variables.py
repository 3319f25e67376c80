"""Combinations of the variables of torch's NCCL groups, with torch's own header: what we set undoes no protection."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from megatron_rl.config.load import load_config
from megatron_rl.config.roles import Placement
from megatron_rl.controller.run_setup import rank_options
from megatron_rl.errors import ConfigError
from megatron_rl.roles.nccl_variables import (
    BLOCKING_WAIT,
    DEBUG_LEVEL,
    DESYNC_DEBUG,
    DUMP,
    ERROR_HANDLING,
    FLAGS,
    MONITORING,
    NUM_RECORDED,
    OLD_NAMES,
    defeats,
    flag,
    nccl_variables,
)

C10D = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
USERS = {
    DUMP: (None, "0", "Yes", "2"),
    MONITORING: (None, "0", "1"),
    DESYNC_DEBUG: (None, "f", "TRUE"),
    OLD_NAMES[DESYNC_DEBUG]: (None, "1"),
    BLOCKING_WAIT: (None, "0", "1"),
    DEBUG_LEVEL: (None, "INFO", "detail"),
    NUM_RECORDED: (None, "0"),
}
"""Values that a user may have set, by variable."""


def combinations() -> list[dict[str, str]]:
    """Every combination of `USERS`."""
    choices = itertools.product(*USERS.values())
    return [{name: value for name, value in zip(USERS, chosen, strict=True) if value is not None} for chosen in choices]


def ends_the_trainer(variables: Mapping[str, str]) -> bool:
    """torch 2.13's own conditions, as `HeartbeatMonitor::runLoop` and the constructor of a group have them."""
    if flag(variables, BLOCKING_WAIT):
        return False  # no watchdog, so no monitor
    dumps = flag(variables, DUMP) and flag(variables, MONITORING)
    handles_errors = flag(variables, DESYNC_DEBUG) or variables.get(DEBUG_LEVEL, "OFF").upper() == "DETAIL"
    return dumps or handles_errors


@pytest.mark.parametrize("survives_losses", [False, True])
def test_no_combination_undoes_what_a_pool_needs(survives_losses: bool) -> None:
    """1296 of the user's: theirs stay, and a survived loss ends no trainer unless it is refused in words. Would not
    catch a variable of a newer torch.
    """
    refused = 0
    for given in combinations():
        try:
            ours = nccl_variables(given, survives_losses)
        except ConfigError as error:
            assert survives_losses and re.search(r"try: (unset )?\w+", str(error))
            assert given.get(DUMP) == "2" or ends_the_trainer({MONITORING: "0", **given})
            refused += 1
            continue
        together = {**given, **ours}
        assert all(together[name] == value for name, value in given.items())
        assert not (survives_losses and ends_the_trainer(together))
        if not survives_losses:
            assert ours == {DUMP: given.get(DUMP, "1"), NUM_RECORDED: given.get(NUM_RECORDED, "2000")}
        elif MONITORING not in given and DUMP not in given:
            assert ours[DUMP] == "1"  # the record is still written
    assert bool(refused) == survives_losses


def test_the_environment_of_before_ended_the_trainer() -> None:
    """The fault itself: the record alone, with torch's own defaults. Would not catch another way to end a process."""
    assert [defeat.names for defeat in defeats(nccl_variables({}, survives_losses=False))] == [(DUMP, MONITORING)]
    assert not defeats(nccl_variables({}, survives_losses=True))


@pytest.mark.parametrize(("recipe", "monitoring"), [("async_cpu", "0"), ("split_cpu", None)])
def test_runs_with_replicas_survive(recipe: str, monitoring: str | None) -> None:
    """The variables that ranks of a run start with. Would not catch a node whose own shell has others."""
    config = load_config(f"configs/{recipe}.yaml", ["trainer.device=cuda"])
    variables = rank_options(config, Placement.of(config)).env
    assert variables.get(MONITORING) == monitoring and variables[DUMP] == "1"


def names_in_torch() -> dict[str, list[str]]:
    """Every variable of torch's NCCL groups: the names by which torch reads it, the strongest first."""
    text = (C10D / "ProcessGroupNCCL.hpp").read_text()
    found = re.findall(r"static std::vector<std::string>\s+(TORCH_NCCL_\w+)\s*=\s*\{([^}]*)\}", text)
    return {name: re.findall(r'"(\w+)"', names) for name, names in found}


def test_torch_has_these_names() -> None:
    """A misspelt name would be ignored in silence. Would not catch a changed meaning."""
    known = names_in_torch()
    assert {*FLAGS, NUM_RECORDED, ERROR_HANDLING} <= set(known)
    for name in FLAGS:
        assert known[name] == [name, *([OLD_NAMES[name]] if name in OLD_NAMES else [])]
    text = (C10D / "ProcessGroupNCCL.hpp").read_text()
    assert "NoHandling = 0" in text and "dumpOnTimeoutOrEx_" in text


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_flags_are_read_as_torch_reads_them(tmp_path: Path) -> None:
    """torch's own function from its header, compiled, over all combinations. Would not catch defaults, which are in a
    source that no wheel has.
    """
    cases = [
        (given, name)
        for given in combinations()
        for name in FLAGS
        if NUM_RECORDED not in given and DEBUG_LEVEL not in given
    ]
    lines = []
    for given, name in cases:
        names = [name, *([OLD_NAMES[name]] if name in OLD_NAMES else [])]
        lines.append(
            f"{','.join(names)} {int(FLAGS[name])} {' '.join(f'{key} {value}' for key, value in given.items())}"
        )
    (tmp_path / "flags.cpp").write_text(
        "#include <torch/csrc/distributed/c10d/Utils.hpp>\n#include <iostream>\n#include <sstream>\n"
        "int main() { std::string line; while (std::getline(std::cin, line)) { clearenv(); std::istringstream in(line);"
        " std::string names, key, value; int def; in >> names >> def; while (in >> key >> value)"
        " setenv(key.c_str(), value.c_str(), 1); try { std::cout << c10d::getCvarBool(c10d::split(',', names), def); }"
        " catch (const std::exception&) { std::cout << 2; } } }\n"
    )
    root = Path(torch.__file__).parent
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        f"-I{root}/include",
        str(tmp_path / "flags.cpp"),
        "-o",
        str(tmp_path / "flags"),
    ]
    command += [f"-L{root}/lib", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{root}/lib"]
    subprocess.run(command, check=True, timeout=240)
    told = subprocess.run(
        [tmp_path / "flags"], input="\n".join(lines), text=True, capture_output=True, check=True
    ).stdout
    for (given, name), answer in zip(cases, told, strict=True):
        try:
            assert flag(given, name) == (answer == "1"), (given, name, answer)
        except ConfigError:
            assert answer == "2", (given, name)
