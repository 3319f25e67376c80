"""Tasks in the form of Harbor's folders (`adapter:harbor`) that need no Docker. Rows are those of
`megatron-rl dataset --from harbor:FOLDER`, a folder of task folders. No `python`: it plays in the run's interpreter.

A turn's last block of bash runs in the task's files, and the policy reads what it prints; a turn without a block ends
the episode. Then `tests/test.sh` runs, and the reward is that of /logs/verifier/reward.txt or reward.json. Both are
confined by the kernel as programs of `megatron_rl.agents.python_tool`, which can read other files of the machine: tests
are copied for the end, but are no secret. In commands and tests the paths /tests, /logs and that of the task's files
(WORKDIR) are replaced by folders of the episode. Programs are the machine's: the image of FROM is not used.

kwargs: timeout_s, the limit of one turn's commands; that of the tests is in task.toml.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

from megatron_rl.plain_values import finite_number
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.confined_program import ConfinedProgram, scratch_folder

NEEDED = ("task.toml", "instruction.md", "environment/Dockerfile", "tests/test.sh")
PLAIN = {"FROM", "WORKDIR", "COPY", "ENV", "LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "USER"}
"""Instructions of a Dockerfile whose result is a folder with files."""
OUTSIDE = re.compile(r"\b(apt|apt-get|apk|curl|wget|pip3?|uvx?|npm|git clone|docker)\b")
"""Programs of tests that install or fetch something."""
BLOCK = re.compile(r"```(?:bash|sh)\n(.*?)```", re.DOTALL)
MOST_OUTPUT = 1 << 16
TESTS_S = 120.0


class Environment:
    """One task, in a folder of its own."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        sandbox.way_of(sandbox.this_kernel())  # raises Refused where the kernel permits no confinement
        self._timeout_s = timeout_s

    async def reset(self, row: dict[str, Any]) -> None:
        """Copy the files of a row's task."""
        path = (row.get("extra_info") or {}).get("task")
        if not isinstance(path, str) or not Path(path).is_dir():
            raise ValueError(f"row {row.get('index')}: extra_info.task={path} must be a task folder of Harbor's")
        self._task = Path(path)
        if problem := problem_of(self._task):
            raise ValueError(f"row {row.get('index')}: {problem}")
        self._scratch = scratch_folder("harbor_")
        self._root = self._scratch.__enter__()
        self._place, copies, self._variables = dockerfile(self._task)
        self._files = self._root / self._place.lstrip("/")
        self._files.mkdir(parents=True)
        for source, target in copies:
            here = self._root / target.lstrip("/")
            here.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, here, dirs_exist_ok=True)
            else:
                shutil.copy(source, here / source.name if target.endswith("/") or here.is_dir() else here)

    async def step(self, turn: Any) -> tuple[str | None, float, bool]:
        """Run the turn's block, or grade the task."""
        blocks = BLOCK.findall(turn.text)
        if not blocks:
            return None, await self._grade(), True
        return await self._output(blocks[-1], self._timeout_s), 0.0, False

    async def cut(self, turn: Any) -> float:
        """Grade the task as it is."""
        return await self._grade()

    async def close(self) -> None:
        """Remove the files."""
        if hasattr(self, "_scratch"):
            self._scratch.__exit__(None, None, None)
            del self._scratch

    async def _grade(self) -> float:
        for place in (self._root / "tests", self._root / "logs"):  # the policy may have made them, as files too
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        verdicts = self._root / "logs/verifier"
        verdicts.mkdir(parents=True)
        shutil.copytree(self._task / "tests", self._root / "tests")
        for file in (self._root / "tests").rglob("*"):
            if file.is_file() and (text := _text(file)) is not None:
                file.write_text(self._moved(text))
        limit = tomllib.loads((self._task / "task.toml").read_text()).get("verifier", {}).get("timeout_sec", TESTS_S)
        printed = await self._output("bash /tests/test.sh", float(limit))
        for file in (verdicts / "reward.txt", verdicts / "reward.json"):
            if (text := _text(file)) is not None:
                reward = finite_number(_number(text))
                if reward is None:
                    raise ValueError(f"{self._task.name}: /logs/verifier/{file.name} holds no number: {text!r:.80}")
                return reward
        raise ValueError(f"{self._task.name}: tests/test.sh has written no reward; it printed: {printed[-300:]!r}")

    async def _output(self, script: str, timeout_s: float) -> str:
        command = ["/bin/bash", "-c", f"cd {shlex.quote(str(self._files))}\n{self._moved(script)}"]
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": str(self._files)}
        variables |= {name: self._moved(value) for name, value in self._variables.items()}
        kept = slice(MOST_OUTPUT)
        program = ConfinedProgram(command, variables, self._root, folder=self._root, kept=kept, has_totals=True)
        late = ""
        try:
            await asyncio.wait_for(program.wait(), timeout_s)
        except TimeoutError:
            late = f"...(ended: it took longer than {timeout_s:g} s)..."
        finally:
            await program.end()
        if not program.status.startswith(sandbox.READY):
            raise RuntimeError(program.status.decode(errors="replace") or "the program has not started")
        printed = program.output.decode(errors="replace").replace(str(self._root), "")
        return (printed + late) or "(no output)"

    def _moved(self, text: str) -> str:
        """Return a text in which paths of a container are those of the episode."""
        places = "|".join(map(re.escape, ("/tests", "/logs", self._place)))
        return re.sub(rf"(?<![\w./~-])({places})(?![\w.-])", rf"{self._root}\1", text)


def rows(name: str, size: int, seed: int) -> list[dict[str, Any]]:
    """Return the tasks of a folder, in the order of their names. Raises ValueError where one needs Docker."""
    folder = Path(name).expanduser().resolve()
    if not folder.is_dir():
        near = difflib.get_close_matches(folder.name, [each.name for each in folder.parent.glob("*")], 1, 0.0)
        raise ValueError(f"{folder} is no folder" + (f"; did you mean: {folder.parent / near[0]}" if near else ""))
    tasks = (
        [folder] if (folder / NEEDED[0]).is_file() else sorted(file.parent for file in folder.glob(f"*/{NEEDED[0]}"))
    )
    if not tasks:
        raise ValueError(f"{folder} has no task folders, which have {', '.join(NEEDED)}")
    if problems := [problem for problem in map(problem_of, tasks) if problem]:
        shown = f"{len(problems)} of {len(tasks)} tasks cannot be used: {'; '.join(problems[:5])}"
        raise ValueError(f"{shown}; try: a folder of the others")
    return [
        {
            "prompt": (task / "instruction.md").read_text(),
            "ground_truth": "",
            "extra_info": {"task": str(task), "name": task.name},
        }
        for task in tasks[:size]
    ]


def problem_of(task: Path) -> str:
    """Return why a task cannot be played without Docker, or ""."""
    for name in NEEDED:
        if not (task / name).is_file():
            return f"{task.name} has no {name}"
    if any((task / "environment").glob("docker-compose*")):
        return f"{task.name}: environment/docker-compose.yaml needs Docker"
    try:
        tomllib.loads((task / "task.toml").read_text())
    except ValueError as error:
        return f"{task.name}: task.toml: {error}"
    try:
        dockerfile(task)
    except (ValueError, IndexError, OSError) as error:
        return f"{task.name}: environment/Dockerfile {error}"
    for number, line in enumerate((task / "tests/test.sh").read_text().splitlines(), 1):
        if not line.lstrip().startswith("#") and OUTSIDE.search(line):
            return f"{task.name}: tests/test.sh, line {number}, installs or fetches something: {line.strip()[:60]}"
    return ""


def dockerfile(task: Path) -> tuple[str, list[tuple[Path, str]], dict[str, str]]:
    """Return (WORKDIR, copies of files, variables). Raises ValueError for an instruction that needs Docker."""
    place = "/app"
    copies: list[tuple[Path, str]] = []
    variables: dict[str, str] = {}
    text = (task / "environment/Dockerfile").read_text().replace("\\\n", " ")
    for line in filter(None, (line.strip() for line in text.splitlines())):
        word, _, rest = line.partition(" ")
        if word.startswith("#"):
            continue
        given = shlex.split(rest)
        if word.upper() not in PLAIN or rest.startswith("--"):
            raise ValueError(f"has an instruction that needs Docker: {line[:60]}")
        if word.upper() == "WORKDIR":
            place = os.path.normpath(Path(place) / given[0])
        elif word.upper() == "ENV":
            variables |= dict(each.split("=", 1) for each in given) if "=" in given[0] else {given[0]: given[1]}
        elif word.upper() == "COPY":
            target = str(Path(place) / given[-1]) + "/" * given[-1].endswith(("/", "."))
            copies += [(task / "environment" / source, target) for source in given[:-1]]
    if place in ("/", "/tests", "/logs"):
        raise ValueError(f"must have a WORKDIR for the task's files; it is {place}")
    for source, target in copies:
        if not source.resolve().is_relative_to((task / "environment").resolve()) or not source.exists():
            raise ValueError(f"copies {source.name}, which is no file of environment/")
        if not Path(os.path.normpath(target)).is_relative_to(place):
            raise ValueError(f"copies to {target}, outside of WORKDIR={place}")
    return place, copies, variables


def _text(file: Path) -> str | None:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def _number(text: str) -> Any:
    """Return the number that a text is as JSON, or the one of its `reward`; None for others."""
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return content.get("reward") if isinstance(content, dict) else content
