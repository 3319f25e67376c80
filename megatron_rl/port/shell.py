"""Run a launch script for its arguments alone: every program that could start, fetch or remove something is a stub.

The shell itself is real, so variables, arithmetic and conditions come out as in a launch. Stubs come as functions of
the shell, which no change of PATH undoes, and as files, for what programs start; they write down how they were called.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.errors import ConfigError

TIME_LIMIT_S = 20.0
NUM_GPUS = 8
"""What `nvidia-smi` lists."""

LAUNCHERS = (
    *("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)), "torchrun", "accelerate", "deepspeed"),
    *("ray", "srun", "sbatch", "salloc", "mpirun", "mpiexec", "nohup", "setsid", "numactl", "uv", "poetry", "xargs"),
    *("docker", "podman", "singularity", "apptainer", "kubectl", "conda", "mamba", "micromamba", "timeout", "nsys"),
    *("screen", "tmux", "at", "crontab", "systemctl", "service", "sudo", "su", "ncu", "env", "stdbuf", "nice"),
)
OTHERS = (
    *("pip", "pip3", "apt", "apt-get", "yum", "npm", "make", "cmake", "ninja", "gcc", "g++", "wget", "curl", "git"),
    *("huggingface-cli", "hf", "wandb", "modelscope", "aws", "gsutil", "hdfs", "hadoop", "rsync", "scp", "ssh"),
    *("rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "chmod", "chown", "tee", "dd", "tar", "unzip", "truncate"),
    *("mount", "umount", "kill", "pkill", "killall", "shutdown", "reboot", "sysctl", "modprobe", "nvidia-smi"),
    *("npu-smi", "rocm-smi", "sleep", "install", "mktemp", "mkfifo", "nc", "telnet", "ulimit", "wait", "perl", "ruby"),
    *("node", "java", "vllm", "swift", "lsof", "fuser", "ibstat", "ip", "ifconfig", "hostname", "unlink", "shred"),
)
MARK = "__port_missing_{}__"
NAME = re.compile(r"(?<!\\)\$(?:\{(\w+)\}|(\w+))")
"""A variable without a default. Of `${X:-d}` and the like nothing is missing."""


@dataclass(frozen=True)
class Launch:
    """How a stub was called: its name, its arguments."""

    name: str
    arguments: tuple[str, ...]


def launches_of(script: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> list[Launch]:
    """Every call of a stub by a script, in order; paths of the scratch folder are the current one's.

    Raises ConfigError where the script does not end in time, or where a value that a trainer is told would be made of a
    variable that nobody has set: it names variable and line.
    """
    text = script.read_text(errors="replace")
    with tempfile.TemporaryDirectory(prefix="megatron_rl_port_") as folder:
        found = _run(script, arguments, environment, Path(folder))
        _refuse_unset(script, (Path(folder) / "said").read_text(errors="replace"))
        marked = _marked(text, environment)
        if marked:
            again = _run(script, arguments, {**environment, **marked}, Path(folder))
            _refuse_missing(script, text, again, marked)
    return found


def _run(script: Path, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> list[Launch]:
    record, scratch, stubs = folder / "calls", folder / "work", folder / "stubs"
    for made in (scratch, stubs):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
    record.write_bytes(b"")
    rules = _write_stubs(stubs, record)
    variables = {**environment, "PATH": f"{stubs}:/usr/bin:/bin", "BASH_ENV": str(rules), "PORT_CALLS": str(record)}
    shell = subprocess.Popen(
        ["/bin/bash", str(script.resolve()), *arguments],
        cwd=scratch,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=(folder / "said").open("wb"),
        start_new_session=True,
    )
    try:
        shell.wait(TIME_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        rule = f"did not end within {TIME_LIMIT_S:g} s, although no program that it starts does anything"
        raise ConfigError(
            f"{script} {rule}; give its arguments themselves: megatron-rl port -- KEY=VALUE ..."
        ) from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    here = str(Path.cwd())
    return [
        Launch(name, tuple(one.replace(str(scratch), here) for one in given))
        for name, *given in _calls(record.read_bytes())
    ]


def _write_stubs(stubs: Path, record: Path) -> Path:
    """Stub files, and the file that every shell reads first."""
    body = f"""name=$1; shift
{{ printf '%d\\0%s\\0' "$#" "$name"; [ $# -eq 0 ] || printf '%s\\0' "$@"; }} >> "$PORT_CALLS"
case $name in
    nvidia-smi) for i in {{1..{NUM_GPUS}}}; do echo "GPU $i"; done ;;
    hostname) echo localhost ;;
esac
"""
    call = stubs / "port-call"
    call.write_text(f"#!/bin/bash -p\n{body}exit 0\n")
    call.chmod(0o755)
    lines = [f'__port_call() {{ /bin/bash -p {call} "$@"; }}', 'command_not_found_handle() { __port_call "$@"; }']
    for name in (*LAUNCHERS, *OTHERS):
        file = stubs / name
        file.write_text(f'#!/bin/bash -p\nexec {call} {name} "$@"\n')
        file.chmod(0o755)
        lines.append(f'{name}() {{ __port_call {name} "$@"; }}')
    lines += [
        'source() { if [ -r "$1" ]; then builtin source "$@"; fi; return 0; }',
        'cd() { builtin cd "$@" 2> /dev/null || true; }',
        'pushd() { builtin pushd "$@" &> /dev/null || true; }',
        "popd() { builtin popd &> /dev/null || true; }",
        'exec() { if [ $# -gt 0 ]; then "$@"; exit; fi; }',
        "shopt -s expand_aliases",
        "trap 'builtin wait' EXIT",
    ]
    rules = stubs / "rules.sh"
    rules.write_text("\n".join(lines) + "\n")
    return rules


def _calls(record: bytes) -> Iterator[list[str]]:
    parts = [part.decode(errors="replace") for part in record.split(b"\0")]
    place = 0
    while place + 1 < len(parts) and parts[place].isdigit():
        end = place + 2 + int(parts[place])
        yield parts[place + 1 : end]
        place = end


def _marked(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that a script uses and neither it nor the environment sets -> marks to find them by."""
    used = {match[1] or match[2] for line in text.splitlines() for match in NAME.finditer(_code(line))}
    made = set(re.findall(r"(?:^|[\s;(]|export\s|local\s|declare\s|readonly\s)(\w+)\+?=", text, re.MULTILINE))
    made |= {*_loop_names(text), *environment}
    names = {name for name in used if not name.isdigit() and not name.isspace()} - made - SHELL_OWN
    return {name: MARK.format(name) for name in sorted(names)}


SHELL_OWN = {
    "RANDOM",
    "SECONDS",
    "PWD",
    "OLDPWD",
    "UID",
    "EUID",
    "PPID",
    "HOSTNAME",
    "BASH_SOURCE",
    "LINENO",
    "_",
    "IFS",
}
SHELL_OWN |= {"SHLVL", "OSTYPE", "HOSTTYPE", "BASH_VERSION", "FUNCNAME", "OPTARG", "OPTIND", "REPLY", "PATH", "BASHPID"}


def _loop_names(text: str) -> list[str]:
    return re.findall(r"\bfor\s+(\w+)\s+in\b", text) + re.findall(r"\bread\s+(?:-\w+\s+)*(\w+)", text)


def _code(line: str) -> str:
    """A line without a comment that is all of it."""
    return "" if line.lstrip().startswith("#") else line


def _refuse_unset(script: Path, said: str) -> None:
    """What the script's own `set -u` and `${X:?}` say."""
    for line in said.splitlines():
        match = re.search(r"line (\d+): (\w+): (unbound variable|parameter null or not set)", line)
        if match is not None:
            raise ConfigError(
                f"{script}, line {match[1]}: the variable {match[2]} is not set; "
                f"set it: {match[2]}=... megatron-rl port {script}"
            )


def _refuse_missing(script: Path, text: str, launches: Sequence[Launch], marked: Mapping[str, str]) -> None:
    for launch in launches:
        for argument in launch.arguments:
            key, equals, value = argument.partition("=")
            missing = [name for name, mark in marked.items() if mark in value] if equals and "." in key else []
            if not missing:
                continue
            name = missing[0]
            pattern = re.compile(rf"\$(\{{{name}\}}|{name}\b)")
            lines = text.splitlines()
            number = next(i for i, line in enumerate(lines, start=1) if pattern.search(_code(line)))
            raise ConfigError(
                f"{script}, line {number}: the variable {name} is not set, and {key} is made of it; "
                f"set it: {name}=... megatron-rl port {script}"
            )
