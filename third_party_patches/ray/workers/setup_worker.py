"""The program that a raylet runs before a Python worker with its own environment: see `../quick_setup.py`.

    setup_worker.py DEFAULT_WORKER ARGUMENT... --language=PYTHON --serialized-runtime-env-context=JSON

It sets the variables of the context and becomes the context's Python with the other arguments. Run as a file, it cannot
import this package; the raylet knows it by its name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

CONTEXT, LANGUAGE = "--serialized-runtime-env-context=", "--language="


def command(arguments: Sequence[str]) -> list[str]:
    """Set os.environ; return the command that this process becomes. Raises ValueError for another language."""
    if f"{LANGUAGE}PYTHON" not in arguments:
        raise ValueError(f"only workers in Python are set up here, not {arguments}")
    [context] = [json.loads(word.removeprefix(CONTEXT)) for word in arguments if word.startswith(CONTEXT)]
    for name, value in context["env_vars"].items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    worker, *rest = (word for word in arguments if not word.startswith((CONTEXT, LANGUAGE)))
    words = [shlex.quote(word) for word in (context["override_worker_entrypoint"] or worker, *rest)]
    return ["bash", "-c", " ".join([*context["command_prefix"], "exec", context["py_executable"], *words])]


if __name__ == "__main__":
    what = command(sys.argv[1:])
    os.execvp(what[0], what)
