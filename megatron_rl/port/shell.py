"""Run a launch script to learn its arguments: every program that could start, fetch or remove something is a stub.

The shell itself is real, so variables, arithmetic and conditions are those of a launch. Stubs are functions of the
shell, and files for programs that start others; they record how they were called. They protect nothing: the kernel
keeps what a script calls by its path, or does by itself, within a scratch folder (`user_code.sandbox`).
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_rl.cluster.programs import Program
from megatron_rl.cluster.stale_processes import leaving_none_running
from megatron_rl.errors import ConfigError
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.confined_program import ConfinedProgram, scratch_folder

TIME_LIMIT_S = 20.0
POLL_S = 0.2
MOST_PROCESSES, MOST_FILES, MOST_BYTES = sandbox.TOTALS[:3]
"""Most processes of a script's group, and most files and bytes of its folder, at once."""
MOST_READ_BYTES = 1 << 20
"""Bytes of stderr that are kept, from the end."""
NUM_GPUS = 8
"""GPUs that `nvidia-smi` lists."""

LAUNCHERS = (
    *("python", "python3", *(f"python3.{minor}" for minor in range(8, 15)), "torchrun", "accelerate", "deepspeed"),
    *("ray", "srun", "sbatch", "salloc", "mpirun", "mpiexec", "nohup", "setsid", "numactl", "uv", "poetry", "xargs"),
    *("docker", "podman", "singularity", "apptainer", "kubectl", "conda", "mamba", "micromamba", "timeout", "nsys"),
    *("screen", "tmux", "at", "crontab", "systemctl", "service", "sudo", "su", "ncu", "env", "stdbuf", "nice"),
    *("ionice", "renice", "taskset", "chrt", "prlimit", "unshare", "setarch", "strace"),
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
"""A variable without a default; `${X:-d}` and the like need no value."""
REFUSED = re.compile(
    r"line (\d+): (.* (?:Permission denied|Operation not permitted|Read-only file system|File size limit exceeded))"
)
"""A shell's message about what the kernel refused."""


MOST_RECORDED_BYTES = 4 << 20
"""Bytes of all calls of a script. A real one has thousands; a call has at most the 2 MiB of a command line."""
ENVIRONMENT = "__port_environment__"
"""The name under which a stub records the environment of the call before it."""
OTHERS_EXPORTS = {"_", "OLDPWD", "PWD", "SHLVL", "LC_CTYPE"}
"""Exported variables that a shell changes by itself, or the Python that confines it."""


@dataclass(frozen=True)
class Launch:
    """One call of a stub. exports: names of variables that the script has changed in its environment."""

    name: str
    arguments: tuple[str, ...]
    exports: tuple[str, ...] = ()


@dataclass(frozen=True)
class ShellRun:
    """A script that has run. launches: every call of a stub, in order. stderr: its end."""

    launches: list[Launch]
    stderr: str

    @property
    def refused(self) -> list[str]:
        """Actions that the kernel refused to the shell itself, by line; other programs have messages of their own."""
        return list(dict.fromkeys(f"line {line}: {what}" for line, what in REFUSED.findall(self.stderr)))


def launches_of(
    script: Path, arguments: Sequence[str], environment: Mapping[str, str], is_trusted: bool = False
) -> ShellRun:
    """Run a script and return its calls of stubs; the current folder's paths replace those of the scratch folder.

    is_trusted: run it without confinement. Raises ConfigError where it cannot be confined or does not end in time, and,
    with variable and line, where a trainer's argument depends on a variable that is not set; and for the line ends of
    Windows.
    """
    written = script.read_bytes()
    if b"\r\n" in written:  # a call would end at its first line, and lose the arguments of all others
        rule = "has the line ends of Windows, with which a shell ends no line as it is meant"
        raise ConfigError(f"{script} {rule}; try: sed -i 's/\\r$//' {shlex.quote(str(script))}")
    text = written.decode(errors="replace")
    ran = _run(script, arguments, environment, {}, is_trusted)
    _refuse_unset(script, ran.stderr)
    marked = _marked(text, environment)
    if marked:
        again = _run(script, arguments, environment, marked, is_trusted)
        _refuse_missing(script, text, again.launches, marked)
    return ran


def _run(
    script: Path,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    marked: Mapping[str, str],
    is_trusted: bool,
) -> ShellRun:
    with scratch_folder("megatron_rl_port_") as folder:
        stubs, work, temporary = folder / "stubs", folder / "open/work", folder / "open/tmp"
        record = folder / "open/calls"
        for made in (stubs, work, temporary):
            made.mkdir(parents=True)
        record.touch()
        own = {"PATH": f"{stubs}:/usr/bin:/bin", "BASH_ENV": str(_write_stubs(stubs)), "PORT_CALLS": str(record)}
        own["LANGUAGE"] = "C"  # for the shell's messages, which are read below
        here = {} if is_trusted else {"TMPDIR": str(temporary)}  # where shells put what is between EOF and EOF
        given = {**environment, **here, **marked, **own}
        stderr = _run_script(script, arguments, given, work, is_trusted)
        places = {str(work): str(Path.cwd()), str(temporary): environment.get("TMPDIR", "/tmp")}
        recorded = _read_record(record)
        if len(recorded) > MOST_RECORDED_BYTES:
            raise ConfigError(
                f"{script} calls programs with more than {MOST_RECORDED_BYTES >> 20} MiB of arguments in all; "
                "give the trainer's arguments themselves: megatron-rl port -- KEY=VALUE ..."
            )
        return ShellRun(list(_launches(recorded, places, given)), stderr)


def _run_script(
    script: Path, arguments: Sequence[str], variables: Mapping[str, str], work: Path, is_trusted: bool
) -> str:
    """Run a script and return the end of its stderr. work: its current folder; it can write to the parent of it alone.

    All that it has started has ended when this returns. Raises ConfigError where the kernel does not sandbox it, and at
    the limits.
    """
    command, kept = ["/bin/bash", str(script.resolve()), *arguments], slice(-MOST_READ_BYTES, None)
    with leaving_none_running():
        try:
            if is_trusted:
                shell = Program(command, variables, kept=kept, folder=work, errors_alone=True)
            else:
                shell = ConfinedProgram(command, variables, work.parent, kept=kept, folder=work, errors_alone=True)
        except OSError as error:
            raise ConfigError(f"{script} is not run: {command[0]} cannot be started: {error.strerror}") from None
        try:
            _wait(script, shell, work.parent)
        finally:
            shell.close()
    if isinstance(shell, ConfinedProgram):
        _refuse_unconfined(script, shell.status)
    return shell.output.decode(errors="replace")


def _read_record(file: Path) -> bytes:
    """Read what the stubs wrote; empty where the script left no regular file."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        is_file = stat.S_ISREG(os.fstat(opened).st_mode)
        return os.read(opened, sandbox.MOST_FILE_BYTES) if is_file else b""
    finally:
        os.close(opened)


def _refuse_unconfined(script: Path, status: bytes) -> None:
    if status == sandbox.READY:
        return
    reason = status.removeprefix(sandbox.READY).decode(errors="replace") or "what confines it cannot be started"
    raise ConfigError(
        f"{script} is not run: {reason}, and nothing else keeps it from your files and processes; where you trust it: "
        f"megatron-rl port --trust-script {script}; or give its arguments themselves: megatron-rl port -- KEY=VALUE ..."
    )


def _wait(script: Path, shell: Program, folder: Path) -> None:
    """Wait for the shell. Raises ConfigError where it passes a limit."""
    limit = time.monotonic() + TIME_LIMIT_S
    most = sandbox.TOTALS._replace(processes=MOST_PROCESSES, files=MOST_FILES, written=MOST_BYTES)
    while not shell.ended_within(POLL_S):
        rule = sandbox.passed_limit(str(folder), shell.pid, most)
        if rule is None and time.monotonic() > limit:
            rule = f"did not end within {TIME_LIMIT_S:g} s, although no program that it starts does anything"
        if rule is not None:
            raise ConfigError(f"{script} {rule}; give its arguments themselves: megatron-rl port -- KEY=VALUE ...")


def _launches(recorded: bytes, places: Mapping[str, str], given: Mapping[str, str]) -> Iterator[Launch]:
    """Yield the recorded calls. places: what stands for what in arguments. given: the script's environment."""
    launch = None
    for name, *words in _calls(recorded):
        if name != ENVIRONMENT:
            if launch is not None:
                yield launch
            launch = Launch(name, tuple(_replaced(word, places) for word in words))
        elif launch is not None:
            variables = dict(word.partition("=")[::2] for word in words)
            changed = {name for name, value in variables.items() if name.isidentifier() and given.get(name) != value}
            launch = replace(launch, exports=tuple(sorted(changed - OTHERS_EXPORTS)))
    if launch is not None:
        yield launch


def _replaced(word: str, places: Mapping[str, str]) -> str:
    for place, meant in places.items():
        word = word.replace(place, meant)
    return word


def _write_stubs(stubs: Path) -> Path:
    """Write the stubs, and return the file that every shell reads first."""
    body = f"""name=$1; shift
{{ printf '%d\\0%s\\0' "$#" "$name"; [ $# -eq 0 ] || printf '%s\\0' "$@"; }} >> "$PORT_CALLS"
case " $* " in
    *" -m "* | *.py* | *main*)
        mapfile -d '' -t variables < /proc/self/environ
        {{
            printf '%d\\0%s\\0' "${{#variables[@]}}" {ENVIRONMENT}
            printf '%s\\0' "${{variables[@]}}"
        }} >> "$PORT_CALLS" ;;
esac
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
    while place + 1 < len(parts) and re.fullmatch("[0-9]{1,9}", parts[place]):
        end = place + 2 + int(parts[place])
        yield parts[place + 1 : end]
        place = end


def _marked(text: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that a script uses and that neither it nor the environment sets -> marks to find them by."""
    used = {match[1] or match[2] for line in text.splitlines() for match in NAME.finditer(_code(line))}
    made = set(re.findall(r"(?:^|[\s;(]|export\s|local\s|declare\s|readonly\s)(\w+)\+?=", text, re.MULTILINE))
    made |= {*_loop_names(text), *environment}
    names = {name for name in used if not name.isdigit() and not name.isspace()} - made - SHELL_OWN
    return {name: MARK.format(name) for name in sorted(names)}


SHELL_OWN = {*"_ BASHPID BASH_SOURCE BASH_VERSION EUID FUNCNAME HOSTNAME HOSTTYPE IFS LINENO OLDPWD OPTARG".split()}
SHELL_OWN |= {*"OPTIND OSTYPE PATH PPID PWD RANDOM REPLY SECONDS SHLVL UID".split()}
"""Variables that a shell sets by itself."""


def _loop_names(text: str) -> list[str]:
    return re.findall(r"\bfor\s+(\w+)\s+in\b", text) + re.findall(r"\bread\s+(?:-\w+\s+)*(\w+)", text)


def _code(line: str) -> str:
    """Return the line, or "" for a comment."""
    return "" if line.lstrip().startswith("#") else line


def _refuse_unset(script: Path, stderr: str) -> None:
    """Raise ConfigError for the messages of the script's own `set -u` and `${X:?}`."""
    for line in stderr.splitlines():
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
