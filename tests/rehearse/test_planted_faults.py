"""Planted faults of two ranks, and what a rehearsal says of them: programs by hand, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import planted_faults
import pytest

from megatron_rl.rehearse.rehearsal import RehearsalError, faults_of, match_of, read_reports
from megatron_rl.rehearse.rehearsal_request import RankOfPool, rank_file
from third_party_patches.torch.fake_cuda import build

REPOSITORY = Path(__file__).parents[2]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of both ranks, by program."""
    library = build(tmp_path_factory.mktemp("pretended"))
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, planted_faults.__file__, str(library)]
    ranks = [
        subprocess.Popen([*command, str(rank)], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    answers = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


@pytest.mark.parametrize("name", planted_faults.PLANTED)
def test_a_planted_fault_is_named(reports, name, tmp_path):
    """Would not catch a fault in code that no program has."""
    words = planted_faults.PLANTED[name][1]
    for number in range(2):
        rank_file(tmp_path, number).write_text(json.dumps(reports[number][name]))
    try:
        found = read_reports(tmp_path, [RankOfPool(number, "", number) for number in range(2)], tmp_path)
        said = "\n".join(match_of(found).sentences() + faults_of(found))
    except RehearsalError as error:
        said = str(error)
    assert all(word in said for word in words), said
    assert words or not said
