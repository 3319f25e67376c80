"""What a script of somebody else's can do while it is run for its arguments: read, and nothing to other files."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from megatron_rl.cli.porting import port_command
from megatron_rl.errors import ConfigError
from megatron_rl.port import shell
from megatron_rl.user_code import sandbox
from megatron_rl.user_code.confined_program import ConfinedProgram, scratch_folder
from megatron_rl.user_code.sandbox import FileProtection, Kernel, Refused

BEST = Kernel("x86_64", 7, filters=True, namespaces=False)
ALLOW, KILL = "allow", "kill"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, FileProtection.LANDLOCK),
        ({"machine": "aarch64", "landlock": 1}, FileProtection.LANDLOCK),
        ({"landlock": 0, "namespaces": True}, FileProtection.NAMESPACE),
        ({"landlock": 0}, "permits neither Landlock nor a user namespace"),
        ({"filters": False}, "permits no filter of system calls"),
        ({"machine": "riscv64"}, "riscv64 are unknown here; known are those of x86_64, aarch64"),
    ],
)
def test_way_by_what_a_kernel_offers(changes, expected):
    """Would not catch a kernel that offers what it does not keep."""
    kernel = BEST._replace(**changes)
    if isinstance(expected, FileProtection):
        assert sandbox.way_of(kernel) is expected
        return
    with pytest.raises(Refused, match=expected):
        sandbox.way_of(kernel)


def test_rights_by_landlock_version():
    """Numbers by hand from linux/landlock.h: bits 1 and 4 to 12, then 13 (refer), 14 (truncate). Would not catch a
    right of later versions that changes a file."""
    assert [sandbox.file_rights(abi) for abi in (1, 2, 3, 7)] == [0x1FF2, 0x3FF2, 0x7FF2, 0x7FF2]


def action(machine: str, number: int, *arguments: int, architecture: int | None = None) -> str | int:
    """What the filter decides of a call: ALLOW, KILL or the error's number."""
    data = [number, architecture or {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine], 0, 0]
    for argument in (*arguments, *[0] * (6 - len(arguments))):
        data += [argument & 0xFFFFFFFF, argument >> 32]
    lines, place, held = sandbox.program_of(machine), 0, 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == 0x20:
            held = data[operand // 4]
        elif code == 0x54:
            held &= operand
        elif code == 0x06:
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(operand, operand & 0xFFFF)
        else:
            holds = {0x15: held == operand, 0x25: held > operand, 0x45: bool(held & operand)}[code]
            place += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "number", "arguments", "expected"),
    [
        ("x86_64", 41, (2, 1), errno.EPERM),  # socket
        ("aarch64", 198, (2, 1), errno.EPERM),
        ("x86_64", 62, (1, 9), errno.EPERM),  # kill
        ("aarch64", 129, (1, 9), errno.EPERM),
        ("aarch64", 41, (0,), errno.EPERM),  # pivot_root there
        ("aarch64", 62, (1, 9), ALLOW),  # lseek there
        ("x86_64", 0x40000000 | 62, (1, 9), errno.ENOSYS),  # kill of x32
        ("x86_64", 452, (), errno.ENOSYS),  # fchmodat2, newer than the table
        ("x86_64", 257, (-100 % 2**64, 0, os.O_TRUNC), errno.EPERM),  # openat that reads, and truncates
        ("x86_64", 2, (0, os.O_TRUNC | 3), errno.EPERM),  # open for nothing, and truncates
        ("x86_64", 2, (0, os.O_TRUNC | os.O_WRONLY | os.O_CREAT), ALLOW),  # files are Landlock's
        ("aarch64", 56, (0, 0, os.O_TRUNC), errno.EPERM),
        ("x86_64", 56, (0x10000000 | 17,), errno.EPERM),  # clone into a user namespace
        ("x86_64", 56, (0x01200011,), ALLOW),  # fork
        ("x86_64", 72, (0, 8, 1), errno.EPERM),  # F_SETOWN
        ("x86_64", 72, (0, 1030, 0), ALLOW),  # F_DUPFD_CLOEXEC
        ("x86_64", 72, (0, 1024, 0), errno.EPERM),  # F_SETLEASE
        ("aarch64", 32, (0, 2), errno.EPERM),  # flock
        ("x86_64", 53, (1, 0o2000001), ALLOW),  # socketpair of connected streams, closed by exec
        ("x86_64", 53, (1, 2), errno.EPERM),  # of datagrams, which may go to any address
        ("aarch64", 199, (2, 1), errno.EPERM),  # of another family
        ("x86_64", 319, (0, 0), errno.EPERM),  # memfd_create
        ("x86_64", 16, (0, 0x40086602), errno.ENOTTY),  # FS_IOC_SETFLAGS
        ("x86_64", 16, (0, 0x5401), ALLOW),  # TCGETS
        ("x86_64", 302, (1234, 0), errno.EPERM),  # prlimit64 of another process
        ("x86_64", 302, (0, 7), ALLOW),
        ("x86_64", 437, (), errno.ENOSYS),  # openat2, whose flags are in memory
    ],
)
def test_the_filter_of_system_calls(machine, number, arguments, expected):
    """Numbers from the kernel's tables. Would not catch a call that changes something and is not in the table."""
    assert action(machine, number, *arguments) == expected


def test_calls_of_another_architecture_end_the_process():
    """int 0x80 of x86_64, which has other numbers. Would not catch a third one."""
    assert action("x86_64", 41, architecture=0x40000003) == KILL


HOSTILE = r"""
find $OUT -name a.ckpt -delete
sed -i s/1/2/ $OUT/abs
gzip $OUT/abs
cd $OUT && ls > list.txt
PATH=/usr/bin:/bin; unset -f touch; touch $OUT/a.ckpt $OUT/touched
hash -p /usr/bin/touch mkdir; unset -f mkdir; mkdir $OUT/hashed
exec 5<>/dev/tcp/127.0.0.1/$PORT
echo x > /dev/udp/127.0.0.1/$PORT
awk -v out=$OUT 'BEGIN { system("/bin/rm -rf " out); print "x" > (out "/awk") }'
/bin/chmod 777 $OUT/abs; /bin/ln $OUT/abs $WORK/linked; echo more >> $OUT/abs
builtin kill -9 $PPID $VICTIM; /bin/kill -9 $VICTIM
echo kept > $WORK/own; cat $WORK/own > $WORK/copy
python3 -m verl.trainer.main_ppo trainer.nnodes=$(cat $WORK/copy)
"""


@pytest.fixture
def outside(tmp_path):
    """A folder, and what else a script finds: -> variables that name them, and a check that nothing was touched."""
    folder = tmp_path / "outside"
    folder.mkdir()
    for name in ("a.ckpt", "abs"):
        (folder / name).write_text("1\n")
        os.utime(folder / name, (1e9, 1e9))
    with socket.create_server(("127.0.0.1", 0)) as server, subprocess.Popen(["/bin/sleep", "60"]) as victim:
        server.setblocking(False)
        variables = {"OUT": str(folder), "PORT": str(server.getsockname()[1]), "VICTIM": str(victim.pid)}

        def check() -> None:
            found = {file.name: (file.read_text(), file.stat()) for file in folder.iterdir()}
            assert {name: text for name, (text, _) in found.items()} == {"a.ckpt": "1\n", "abs": "1\n"}
            assert {(state.st_mtime, state.st_mode & 0o777, state.st_nlink) for _, state in found.values()} == {
                (1e9, 0o644, 1)
            }
            with pytest.raises(BlockingIOError):
                server.accept()
            assert victim.poll() is None

        yield variables, check
        victim.kill()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where scratch folders come; nothing may be left there."""
    place = tmp_path / "scratch"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    assert list(place.iterdir()) == []


def written(folder: Path, text: str) -> Path:
    file = folder / "run.sh"
    file.write_text(text)
    return file


def test_a_hostile_script_changes_nothing(tmp_path, outside, scratch):
    """Files, sockets and processes outside; its own files it may write. Would not catch a change of a file's extended
    attributes, which the filter's table has."""
    variables, check = outside
    ran = shell.launches_of(written(tmp_path, HOSTILE.replace("$WORK", "$TMPDIR")), [], {"HOME": "/", **variables})
    check()
    assert ran.launches[-1].arguments == ("-m", "verl.trainer.main_ppo", "trainer.nnodes=kept")
    refused = dict.fromkeys(one.partition(": ")[0] for one in ran.refused)
    assert [*refused] == ["line 5", "line 8", "line 9", "line 11", "line 12"]


UNDER = """
import os, sys
from megatron_rl.user_code import sandbox
changes = eval(sys.argv[1])
sandbox.confine(sys.argv[2], sandbox.this_kernel()._replace(**changes))
os.chdir(sys.argv[2])
os.execv("/bin/bash", ["/bin/bash", sys.argv[3]])
"""


@pytest.mark.parametrize("changes", [{"landlock": 1}, {"landlock": 2}, {"landlock": 0, "namespaces": True}], ids=str)
def test_older_kernels_keep_a_script_too(tmp_path, outside, changes):
    """This kernel with less: Landlock without truncating, and none. Would not catch what only an old one does."""
    if "namespaces" in changes and not sandbox._has_namespaces():
        pytest.skip("no user namespace with mounts of its own is permitted here")
    variables, check = outside
    work = tmp_path / "work"
    work.mkdir()
    script = written(tmp_path, HOSTILE.replace("python3", "printf '%s ' > args").replace("cd $OUT", "false"))
    command = [sys.executable, "-c", UNDER, repr(changes), str(work), str(script)]
    environment = {**variables, "WORK": str(work), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    check()
    assert (work / "args").read_text() == "-m verl.trainer.main_ppo trainer.nnodes=kept ", done.stderr


NEITHER = """
import os, sys, errno
from pathlib import Path
from megatron_rl.errors import ConfigError
from megatron_rl.port import shell
from megatron_rl.user_code import sandbox
sandbox._drop_capabilities()
sandbox.REFUSED = sandbox._numbers("landlock=444,444 unshare=272,97")
sandbox._filter_calls(sandbox.program_of(os.uname().machine), 0)
script = Path(sys.argv[1])
try:
    shell.launches_of(script, [], {})
except ConfigError as error:
    print(error)
print(shell.launches_of(script, [], {}, is_trusted=True).launches)
"""


def test_without_the_kernels_help_a_script_is_run_on_demand(tmp_path):
    """A process to which Landlock and namespaces are forbidden. Would not catch a reason that only old kernels give."""
    ran = tmp_path / "ran"
    script = written(tmp_path, f"echo x >> {ran}; python3 a.b=1")
    command = [sys.executable, "-c", NEITHER, str(script)]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    refusal, launches = done.stdout.splitlines()
    assert refusal.startswith(f"{script} is not run: this kernel permits neither Landlock nor a user namespace")
    assert f"megatron-rl port --trust-script {script}" in refusal
    assert "python3" in launches and ran.read_text() == "x\n"  # once: the first time it was not run


def test_the_option_of_the_command(tmp_path, scratch):
    """Confined, a trainer whose output goes elsewhere is not seen, and the message says why; trusted, it is. Would not
    catch what else a trusted script does."""
    log = tmp_path / "log"
    script = written(tmp_path, f"python3 -m verl.trainer.main_ppo trainer.nnodes=2 > {log}")
    with pytest.raises(ConfigError, match=rf"line 1: {log}: Permission denied \(--trust-script permits it"):
        port_command([str(script)], out=tmp_path / "out.yaml")
    assert not log.exists()
    with pytest.raises(typer.Exit) as ended:
        port_command([str(script)], out=tmp_path / "out.yaml", trust_script=True)
    with pytest.raises(ConfigError, match="--trust-script is for a shell script, and x.yaml is none"):
        port_command(["x.yaml"], out=tmp_path / "out.yaml", trust_script=True)
    assert ended.value.exit_code == 0 and log.exists() and "nnodes: 2" in (tmp_path / "out.yaml").read_text()


@pytest.mark.parametrize(
    ("text", "limits", "expected"),
    [
        ("b() { b & b & b; }; b", {"MOST_PROCESSES": 40}, "more than 40 processes"),
        ("yes > f; while :; do :; done", {"MOST_BYTES": 32 << 20}, "or 32 MiB"),
        ("i=0; while :; do : > f$i; i=$((i + 1)); done", {"MOST_FILES": 500}, "more than 500 files"),
        ("yes >&2", {}, "did not end within 0.3 s"),
        ("builtin exec 2>&-; while :; do :; done", {}, "did not end within 0.3 s"),
    ],
    ids=["processes", "bytes", "files", "stderr", "closed stderr"],
)
def test_limits(tmp_path, monkeypatch, scratch, text, limits, expected):
    """Would not catch a script that stays just below them."""
    for name, most in limits.items():
        monkeypatch.setattr(shell, name, most)
    monkeypatch.setattr(shell, "TIME_LIMIT_S", 30.0 if limits else 0.3)
    with pytest.raises(ConfigError, match=expected):
        shell.launches_of(written(tmp_path, text), [], {})


def test_what_doubles_is_held_by_the_kernel(tmp_path, scratch):
    """As where nobody gets to look: its processes double for two seconds after they are many. Would not catch a kernel
    that asks nobody before it forks.
    """
    script, variables = written(tmp_path, "b() { b & b & b; }; b"), {"PATH": "/usr/bin:/bin"}
    doubling = ConfinedProgram(["/bin/bash", str(script)], variables, tmp_path, kept=slice(0), errors_alone=True)
    try:
        most, looks = 0, 0
        while looks < 10:
            assert not doubling.ended_within(0.2)
            most = max(most, len(sandbox._members(doubling.pid)))
            looks += most > sandbox.TOTALS.processes
    finally:
        doubling.close()
    assert most < 2 * sandbox.MOST_FORKED


RUNAWAY = """
import os, time
try:
    os.setsid()
except OSError:
    pass
time.sleep(300)
"""


def test_nothing_is_left(tmp_path, scratch):
    """No process that tried to leave, no closed folder; files end at 64 MiB. A record that a script made a folder, or
    nonsense, holds no calls. Would not catch a process that a service outside starts."""
    mark = tmp_path / "runaway.py"
    mark.write_text(RUNAWAY)
    text = f"""
trap - EXIT
{sys.executable} -S {mark} &
umask 777; /bin/mkdir closed; umask 22
printf '99999999999999999999\\0a\\0' >> "$PORT_CALLS"
head -c 70000000 /dev/zero > large; python3 a.b=$(stat -c %s large)
"""
    shell.launches_of(written(tmp_path, text), [], {})
    assert list(scratch.iterdir()) == []
    text = text.replace("printf", "true")
    assert shell.launches_of(written(tmp_path, text), [], {}).launches[-1].arguments == (f"a.b={64 << 20}",)
    text = '/bin/rm "$PORT_CALLS"; /bin/mkdir "$PORT_CALLS"'
    assert shell.launches_of(written(tmp_path, text), [], {}).launches == []
    wait_until(lambda: not running_with(str(mark)))


STARTER = """
import sys
from pathlib import Path
from megatron_rl.cluster.signals import exit_on_signals
from megatron_rl.port import shell
exit_on_signals()
shell.launches_of(Path(sys.argv[1]), [], {})
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_script_ends_with_the_process_that_runs_it(tmp_path, number):
    """Killed, that process leaves the folder; ended, nothing. Would not catch a signal before the script has begun."""
    mark, scratch = tmp_path / "mark", tmp_path / "scratch"
    scratch.mkdir()
    script = written(tmp_path, f"( builtin exec -a {mark} /bin/sleep 300 ) & while :; do :; done")
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(scratch)}
    with subprocess.Popen([sys.executable, "-c", STARTER, str(script)], env=environment) as starter:
        wait_until(lambda: running_with(str(mark)))
        starter.send_signal(number)
        assert starter.wait(20) == (143 if number == signal.SIGTERM else -9)
    wait_until(lambda: not running_with(str(mark)) and not running_with(str(script)))
    assert len(list(scratch.iterdir())) == (number == signal.SIGKILL)


def test_folders_of_any_depth_are_removed(tmp_path, scratch):
    """1100 in one another, a link to a folder outside, and one that nobody may read. Would not catch one that grows."""
    kept = tmp_path / "kept"
    (kept / "inner").mkdir(parents=True)
    with scratch_folder("test_") as folder:
        (folder / "link").symlink_to(kept)
        (folder / "closed").mkdir(mode=0)
        place = os.open(folder, os.O_RDONLY)
        for _ in range(1100):
            os.mkdir("a", dir_fd=place)
            above, place = place, os.open("a", os.O_RDONLY, dir_fd=place)
            os.close(above)
        os.close(place)
    assert (kept / "inner").is_dir()


def wait_until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def running_with(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [file.parent.name] if word.encode() in file.read_bytes() else []
        except OSError:
            continue
    return found
