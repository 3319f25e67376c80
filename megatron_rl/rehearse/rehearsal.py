"""The command's side of a rehearsal: build the fake device, start the process, read what the ranks wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.cluster.child_processes import variables_with
from megatron_rl.cluster.programs import answer_of
from megatron_rl.config.file_kinds import read_whole
from megatron_rl.errors import ConfigError, MegatronRLError
from megatron_rl.observe.appended_file import new_file
from megatron_rl.rehearse.group_calls import GroupCall
from megatron_rl.rehearse.matcher import Match, match_calls, ranks_text
from megatron_rl.rehearse.rehearsal_request import RankOfPool, RehearsalRequest, rank_file

BUILD_LIMIT_S = 120.0
"""Seconds that g++ may take; on an idle machine it takes two."""
LONGEST_SAID = 2000
KIND = 25
"""Characters at the end of a fault's sentence, by which its kind differs."""
LARGEST_LIBRARY = 64 << 20
"""Bytes; it has some ten thousand."""


class RehearsalError(MegatronRLError):
    """A rank's code failed, or needs more memory than planned."""

    exit_code = 1


def rehearse(request: RehearsalRequest, scratch: Path) -> list[dict[str, Any]]:
    """Rehearse the ranks and return their reports, in order of their numbers. scratch: an empty folder.

    Raises ConfigError where no compiler is installed, RehearsalError where a rank failed, with its traceback.
    """
    library = built_library(scratch)
    out = Path(request.out)
    out.mkdir(parents=True, exist_ok=True)
    for rank in request.ranks:
        rank_file(out, rank.number).unlink(missing_ok=True)
    request_file, log = scratch / "request.json", out / "log.txt"
    replace(request, library=str(library)).write(request_file)
    with new_file(log) as output:
        command = [sys.executable, "-m", "megatron_rl.rehearse.child", str(request_file)]
        variables = variables_with(TMPDIR=str(scratch))  # a rank that is killed leaves its files there
        subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=variables, check=False
        )
    return read_reports(out, request.ranks, log)


def built_library(scratch: Path) -> Path:
    """Return the library of the fake device, built in `scratch`. Raises ConfigError where g++ builds none."""
    if shutil.which("g++") is None:
        raise ConfigError("a rehearsal builds a small library with g++, which is not installed; try: apt install g++")
    from third_party_patches.torch.fake_cuda import build_command

    command, library = build_command(scratch)
    answer = answer_of(command, BUILD_LIMIT_S, temporary=scratch)
    if answer.fault or not is_library(library):
        why = answer.fault or "g++ made no library"
        said = f", and says:\n{answer.text[-LONGEST_SAID:]}" if answer.text else ""
        raise ConfigError(
            f"a rehearsal builds a small library with g++, and {why}{said}; try: apt install --reinstall g++"
        )
    return library


def is_library(file: Path) -> bool:
    """Whether a file begins as programs and libraries of Linux do."""
    with suppress(OSError):
        return read_whole(file, LARGEST_LIBRARY).startswith(b"\x7fELF")
    return False


def read_reports(out: Path, ranks: Sequence[RankOfPool], log: Path) -> list[dict[str, Any]]:
    """Return the reports of these ranks. Raises RehearsalError for the first that failed, or wrote none: with what
    did not fit in the calls of all ranks until then, which may be the cause.
    """
    reports = []
    for rank in sorted(ranks, key=lambda one: one.number):
        file = rank_file(out, rank.number)
        if not file.exists():
            raise RehearsalError(f"rank {rank.number} wrote no report; end of its log {log}:\n{_end_of(log)}")
        reports.append(json.loads(file.read_text()))
    failed = next((report for report in reports if "failure" in report), None)
    if failed is not None:
        before = [*match_of(reports).first_differences(), *faults_of(reports)]
        cause = f"\nbefore that: {'; '.join(before)}" if before else ""
        raise RehearsalError(f"rank {failed['number']} could not be rehearsed:\n{failed['failure']}{cause}")
    return reports


def match_of(reports: Sequence[dict[str, Any]]) -> Match:
    """Return how the calls of the ranks with these reports continue together."""
    return match_calls({one["number"]: list(map(GroupCall.from_json, one.get("calls", ()))) for one in reports})


def faults_of(reports: Sequence[dict[str, Any]], most: int = 8) -> list[str]:
    """Return a sentence for each fault that ranks found in their own work, with its ranks; the first `most`, one of
    each kind before others, so that a fault of many lines hides none.
    """
    ranks: dict[str, list[int]] = {}
    for report in reports:
        for fault in report.get("faults", ()):
            ranks.setdefault(fault, []).append(report["number"])
    of_kind = Counter[str]()
    place: dict[str, int] = {}
    for fault in ranks:
        place[fault] = of_kind[fault[-KIND:]]
        of_kind[fault[-KIND:]] += 1
    found = [f"{ranks_text(ranks[fault])}: {fault}" for fault in sorted(ranks, key=lambda one: place[one])]
    return found[:most] + [f"and {len(found) - most} more like these"] * (len(found) > most)


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-LONGEST_SAID:]
