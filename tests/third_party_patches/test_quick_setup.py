"""How Ray's workers are set up: as by Ray's own file, without an import of Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from third_party_patches.ray.workers import setup_worker

WORKER = ["/ray/default_worker.py", "--node-ip-address=1.2.3.4", "--name=two words", "--quote=it's; $HOME"]
CONTEXTS = {
    "plain": {},
    "variables": {"env_vars": {"A": "two words", "B": "${A}/${HOME}:$HOME", "C": "x${NOT_THERE}y", "D": "${lower}"}},
    "python": {"py_executable": "python -I 'a file.py'", "env_vars": {"A": "1"}},
    "container": {"command_prefix": ["cd", "/tmp", "&&"], "override_worker_entrypoint": "/inside/worker.py"},
}


def theirs(arguments: list[str], variables: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What Ray's own file becomes, and with which environment."""
    folder = Path(pytest.importorskip("ray").__file__).parent / "_private/workers"
    code = (
        "import json, os, runpy, sys\n"
        "os.execvp = lambda file, args: print(json.dumps([args, dict(os.environ)]))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    code = f"import sys; sys.argv[:1] = [{str(folder / 'setup_worker.py')!r}]\n{code}"
    ran = subprocess.run([sys.executable, "-c", code, *arguments], env=variables, capture_output=True, check=True)
    line, environment = json.loads(ran.stdout)
    return line, environment


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_a_worker_is_what_rays_own_file_makes_it(context: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command and its environment. Would not catch a field of the context that a later Ray adds: see the guard."""
    from ray._private.runtime_env.context import RuntimeEnvContext

    text = RuntimeEnvContext(**context).serialize()
    arguments = [*WORKER, "--language=PYTHON", f"--serialized-runtime-env-context={text}"]
    for name in set(os.environ) - {"PATH"}:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/me")
    line, environment = theirs(arguments, dict(os.environ))
    assert setup_worker.command(arguments) == line
    added = {name for name in environment.keys() - os.environ.keys() if name not in context.get("env_vars", {})}
    assert {name: value for name, value in environment.items() if name not in added} == dict(os.environ)


def test_it_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    """Run as the raylet runs it, it becomes the worker that it was given, and has not imported Ray before."""
    (tmp_path / "worker.py").write_text("import os, sys\nprint(sys.argv[1:], os.environ['A'])\n")
    context = {"command_prefix": [], "env_vars": {"A": "b c"}, "override_worker_entrypoint": None}
    context["py_executable"] = sys.executable
    arguments = [str(tmp_path / "worker.py"), "--language=PYTHON", "-x", setup_worker.CONTEXT + json.dumps(context)]
    ours = [sys.executable, "-X", "importtime", setup_worker.__file__, *arguments]
    ran = subprocess.run(ours, capture_output=True, text=True, check=True)
    assert ran.stdout == "['-x'] b c\n"
    assert "shlex" in ran.stderr and " ray" not in ran.stderr
    refused = subprocess.run([*ours[:4], "Worker", "--language=JAVA"], capture_output=True, text=True)
    assert refused.returncode != 0 and "only workers in Python" in refused.stderr
