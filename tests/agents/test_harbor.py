"""Task folders of Harbor: played in a folder of their own, graded by their tests, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_rl.agents.adapters import harbor
from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import ClassSource, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, Observation, TextLimit, Turn

pytestmark = pytest.mark.timeout(120)

TEST = "#!/bin/bash\ncmp -s /app/hello.txt /app/seed.txt && echo 1 > /logs/verifier/reward.txt || echo {} > {}\n"
FILES = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n',
    "instruction.md": "Copy seed.txt to hello.txt.\n",
    "environment/Dockerfile": "FROM python:3.12\nENV NAME=/app/seed.txt\nWORKDIR /app\nCOPY seed.txt .\n",
    "environment/seed.txt": "hey\n",
    "tests/test.sh": TEST.format("0.25", "/logs/verifier/reward.txt"),
}


def task(folder: Path, **changed: str | None) -> Path:
    names = {name.replace("/", "_").replace(".", "_"): name for name in FILES}
    for name, text in (FILES | {names[name]: text for name, text in changed.items()}).items():
        if text is not None:
            (folder / "one" / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / "one" / name).write_text(text)
    return folder


def played(folder: Path, *texts: str, timeout_s: float = 60.0) -> list[Observation | EpisodeFailure]:
    of = ClassSource(str(harbor.__file__), "Environment", "environment.path", {"timeout_s": timeout_s}, TextLimit(400))
    (row,), replies, before = harbor.rows(str(folder), 5, 0), [], ()
    with EnvironmentsHere(of.host()) as environments:
        for text in texts:
            environments.play(0, TurnJob(0, {"index": 0, **row}, before, Turn(text)))
            ((_, reply),) = environments.take(waits=True)
            replies, before = [*replies, reply], (*before, (Turn(text), reply))
    return replies


def in_bash(script: str) -> str:
    return f"I try.\n```bash\n{script}\n```"


@pytest.mark.parametrize(
    ("scripts", "says", "reward"),
    [
        (["cat $NAME; pwd", "cp seed.txt /app/hello.txt"], "hey\n/app\n", 1.0),
        ([], None, 0.25),
        (
            ["mkdir -p /logs/verifier /tests; echo 9 > /logs/verifier/reward.txt; echo > /tests/test.sh"],
            "(no out",
            0.25,
        ),
        (["echo > /tests; echo > /logs"], "(no output)", 0.25),
        (["echo 9 > /tmp/outside; sleep 60"], "Permission denied\n...(ended: it took longer than 5 s)", 0.25),
    ],
)
def test_a_task_is_graded_by_its_tests(tmp_path: Path, scripts: list[str], says: str | None, reward: float):
    """Solved, not tried, and by a policy that writes the reward, the tests, or elsewhere. Would not catch one that
    reads the tests.
    """
    timeout_s = 5.0 if "sleep" in str(scripts) else 60.0
    *replies, last = played(task(tmp_path), *map(in_bash, scripts), "done", timeout_s=timeout_s)
    assert last == Observation((), reward, True) and says is None or says in replies[0].messages[0]["content"]


@pytest.mark.parametrize(
    ("test", "reason"),
    [("exit 3", "has written no reward"), (TEST.format("nan", "/logs/verifier/reward.json"), "holds no number: 'nan")],
)
def test_a_task_without_a_verdict_fails(tmp_path: Path, test: str, reason: str):
    """Would not catch a wrong verdict."""
    (failed,) = played(task(tmp_path, tests_test_sh=test), "done")
    assert isinstance(failed, EpisodeFailure) and reason in failed.reason


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (
            {"environment_Dockerfile": "FROM a\nRUN make\n"},
            "one: environment/Dockerfile has an .* needs Docker: RUN make",
        ),
        ({"environment_Dockerfile": "FROM a\nCOPY ../tests /app/t\n"}, "copies tests, which is no file"),
        ({"environment_Dockerfile": "FROM a\nCOPY seed.txt /etc/\n"}, "outside of WORKDIR=/app"),
        ({"environment_Dockerfile": "WORKDIR /\n"}, "must have a WORKDIR"),
        ({"environment_Dockerfile": "WORKDIR\n"}, "one: environment/Dockerfile"),
        ({"tests_test_sh": "echo\nuvx pytest\n"}, "test.sh, line 2, installs or fetches something: uvx pytest"),
        ({"task_toml": "= ["}, "one: task.toml: Invalid"),
        ({"instruction_md": None}, "one has no instruction.md"),
    ],
)
def test_a_task_that_needs_docker_is_refused(tmp_path: Path, changed: dict[str, str | None], reason: str):
    """With the line. Would not catch tests that fetch by a program of another name: they write no reward, or fail."""
    with pytest.raises(ValueError, match=reason):
        harbor.rows(str(task(tmp_path, **changed)), 5, 0)
