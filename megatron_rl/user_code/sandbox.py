"""Start a program that cannot change a file outside of one folder, open a socket, or send a signal.

    python -I -S sandbox.py [--totals] FD FOLDER PROGRAM ARGUMENT...

in a process group of its own, all of which ends with the process that started this one.

The kernel enforces this for the program and for all that it starts. Landlock protects files; on a kernel without it, a
user and a mount namespace do, in which a named pipe outside can still be written to. A filter of system calls (seccomp)
refuses what neither covers: modes, owners, times and attributes of files, sockets, signals, and leaving the process
group. Of root's capabilities only that to read is left. FD receives READY just before PROGRAM starts, or the reason why
it does not start. With --totals the process group is ended where all its processes together pass a limit, and FD
receives which one. Where the kernel asks before it forks (seccomp's notices, Linux 5.19), a group has about MOST_FORKED
processes at most, however busy the machine is; one that doubles would take all numbers of processes within a second.

This is a program of its own, without imports of this project: a process that confines itself must have one thread.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

READY = b"+"
MOST_FILE_BYTES = 64 << 20
MOST_MEMORY_BYTES, MOST_CPU_S = 4 << 30, 60
"""Limits of one process."""
MOST_DESCRIPTORS = 1024
POLL_S = 0.2

Numbers = dict[str, dict[str, int]]
"""System call -> machine -> number."""
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine -> the kernel's constant for it (AUDIT_ARCH)."""


def _numbers(text: str) -> Numbers:
    """Read NAME=X86_64,AARCH64; "-": the machine has no such call."""
    table: Numbers = {}
    for entry in text.split():
        name, _, numbers = entry.partition("=")
        pairs = zip(MACHINES, numbers.split(","), strict=True)
        table[name] = {machine: int(number) for machine, number in pairs if number != "-"}
    return table


FILES = _numbers("""
    chmod=90,- fchmod=91,52 fchmodat=268,53 chown=92,- fchown=93,55 lchown=94,- fchownat=260,54 utime=132,-
    utimes=235,- futimesat=261,- utimensat=280,88 setxattr=188,5 lsetxattr=189,6 fsetxattr=190,7 removexattr=197,14
    lremovexattr=198,15 fremovexattr=199,16 truncate=76,45 symlink=88,- symlinkat=266,36 mknod=133,- mknodat=259,33
    open_by_handle_at=304,265 chroot=161,51 mount=165,40 umount2=166,39 pivot_root=155,41 open_tree=428,428
    move_mount=429,429 fsopen=430,430 fsconfig=431,431 fsmount=432,432 fspick=433,433 mount_setattr=442,442
    unshare=272,97 setns=308,268 flock=73,32
""")
"""Modes, owners, times and attributes of files; links and pipes, which could harm the clean-up; mounts; locks, which
would be granted for files that may only be read.
"""
TALK = _numbers("""
    socket=41,198 connect=42,203 bind=49,200 listen=50,201 shmget=29,194 shmctl=31,195 shmat=30,196 semget=64,190
    semop=65,193 semctl=66,191 semtimedop=220,192 msgget=68,186 msgsnd=69,189 msgrcv=70,188 msgctl=71,187
    mq_open=240,180 mq_unlink=241,181 add_key=248,217 request_key=249,218 keyctl=250,219 bpf=321,280
    perf_event_open=298,241
    userfaultfd=323,282 memfd_create=319,279 memfd_secret=447,447
""")
"""Sockets, and other ways to send something to other processes; memory that no process is seen to have."""
PROCESSES = _numbers("""
    kill=62,129 tkill=200,130 tgkill=234,131 rt_sigqueueinfo=129,138 rt_tgsigqueueinfo=297,240
    pidfd_send_signal=424,424 ptrace=101,117 process_vm_writev=311,271 process_madvise=440,440
    process_mrelease=448,448 pidfd_getfd=438,438 setpriority=141,140 ioprio_set=251,30 sched_setparam=142,118
    sched_setscheduler=144,119 sched_setaffinity=203,122 sched_setattr=314,274 migrate_pages=256,238
    move_pages=279,239 setsid=112,157 setpgid=109,154
""")
"""Signals, and other ways to change processes; leaving the process group, by which all are ended."""
REFUSED = FILES | TALK | PROCESSES
"""Calls that fail with EPERM."""
HIDDEN = _numbers("openat2=437,437 clone3=435,435 io_uring_setup=425,425 io_uring_enter=426,426")
"""Calls whose arguments or effects a filter cannot see. They fail as on a kernel without them, so that C libraries take
older ones.
"""
NEWEST = 450
"""Calls of larger numbers, which later kernels added, fail as on a kernel without them."""
FURTHER = _numbers(
    "open=2,- openat=257,56 clone=56,220 fork=57,- vfork=58,- fcntl=72,25 ioctl=16,29 "
    "prlimit64=302,261 socketpair=53,199 capget=125,90 capset=126,91 seccomp=317,277"
)
"""Calls that are decided by an argument, or used here."""

SIGNALLING = (8, 10, 15, 1024, 1026)
"""Commands of fcntl that make a file send signals: owner, signal, lease, which holds up who opens it, and notice."""
UNIX_SOCKET, STREAM_SOCKET, SOCKET_TYPES = 1, 1, 0xF
"""A pair of them is connected to itself for ever, as a pipe is; asyncio needs one."""
ASKING = (0x5401, 0x802C542A, 0x5413, 0x540F, 0x541B, 0x5421, 0x5450, 0x5451)
"""Permitted requests of ioctl: settings, size and group of a terminal, bytes to read, modes of a descriptor."""
NEW_NAMESPACES, NEW_THREAD = 0x7E020000, 0x00010000
"""Flags of clone."""
LANDLOCK = {"create": 444, "add": 445, "restrict": 446}
WRITE_FILE, TRUNCATE = 1 << 1, 1 << 14
DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
"""Devices that may be written to."""
READ_SEARCH = 1 << 2
"""The capability to read all that root may read."""


class FileProtection(Enum):
    """The protection of files; a filter of system calls does the rest."""

    LANDLOCK = "Landlock"
    NAMESPACE = "a user and a mount namespace"


class Kernel(NamedTuple):
    """The means of a kernel. landlock: its ABI, 0 for none. namespaces: a user namespace with mounts of its own."""

    machine: str
    landlock: int
    filters: bool
    namespaces: bool


class Refused(Exception):
    """The program cannot be confined; the message says why."""


def way_of(kernel: Kernel) -> FileProtection:
    """Choose the protection of files. Raises Refused where this kernel offers too little."""
    if kernel.machine not in MACHINES:
        raise Refused(
            f"the system calls of {kernel.machine} are unknown here; known are those of {', '.join(MACHINES)}"
        )
    if not kernel.filters:
        raise Refused("this kernel permits no filter of system calls (seccomp)")
    if kernel.landlock >= 1:
        return FileProtection.LANDLOCK
    if kernel.namespaces:
        return FileProtection.NAMESPACE
    raise Refused("this kernel permits neither Landlock nor a user namespace with mounts of its own")


def file_rights(abi: int) -> int:
    """Landlock's rights to change files, as bits: to write, remove and make; from ABI 2 to move, from 3 to truncate.

    On older ABIs every move to another folder is refused, and the filter of system calls refuses the ways to truncate
    that opening for writing does not cover.
    """
    made = sum(1 << bit for bit in range(4, 13))
    return WRITE_FILE | made | (1 << 13 if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0)


Instruction = tuple[int, int, int, int]
LOAD, IF_EQUAL, IF_ABOVE, IF_BITS, AND, RETURN = 0x20, 0x15, 0x25, 0x45, 0x54, 0x06
ALLOW, ASK, KILL = 0x7FFF0000, 0x7FC00000, 0x80000000


def _fails(number: int) -> Instruction:
    return (RETURN, 0, 0, 0x00050000 | number)


def _argument(index: int) -> Instruction:
    """Load the lower half of an argument; all arguments that are checked have 32 bits."""
    return (LOAD, 0, 0, 16 + 8 * index)


def program_of(machine: str, forks: int = ALLOW) -> list[Instruction]:
    """Return the filter as BPF instructions: code, jump if true, jump if false, operand. forks: what they meet."""
    allow, refuse = (RETURN, 0, 0, ALLOW), _fails(errno.EPERM)
    lines: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (IF_EQUAL, 1, 0, MACHINES[machine]),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, 0),
    ]

    def call(name: str, *then: Instruction) -> None:
        number = (REFUSED | HIDDEN | FURTHER)[name].get(machine)
        if number is not None:
            lines.extend([(IF_EQUAL, 0, len(then), number), *then])

    lines += [(IF_ABOVE, 0, 1, NEWEST), _fails(errno.ENOSYS)]
    for name in HIDDEN:
        call(name, _fails(errno.ENOSYS))
    for name in REFUSED:
        call(name, refuse)
    new = ((IF_BITS, 0, 1, NEW_NAMESPACES), refuse)
    call("clone", _argument(0), *new, (IF_BITS, 0, 1, NEW_THREAD), allow, (RETURN, 0, 0, forks))
    for name in ("fork", "vfork"):
        call(name, (RETURN, 0, 0, forks))
    owners = [step for command in SIGNALLING for step in ((IF_EQUAL, 0, 1, command), refuse)]
    call("fcntl", _argument(1), *owners, allow)
    asking = [step for request in ASKING for step in ((IF_EQUAL, 0, 1, request), allow)]
    call("ioctl", _argument(1), *asking, _fails(errno.ENOTTY))
    pair = (_argument(0), (IF_EQUAL, 1, 0, UNIX_SOCKET), refuse, _argument(1), (AND, 0, 0, SOCKET_TYPES))
    call("socketpair", *pair, (IF_EQUAL, 0, 1, STREAM_SOCKET), allow, refuse)
    call("prlimit64", _argument(0), (IF_EQUAL, 0, 1, 0), allow, refuse)
    unwritten = [
        step for access in (os.O_RDONLY, os.O_ACCMODE) for step in ((IF_EQUAL, 0, 1, os.O_TRUNC | access), refuse)
    ]
    for name, index in (("open", 1), ("openat", 2)):
        call(name, _argument(index), (AND, 0, 0, os.O_TRUNC | os.O_ACCMODE), *unwritten, allow)
    return [*lines, allow]


LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
NO_NEW_PRIVILEGES, SIGNAL_OF_PARENTS_END, SET_FILTER = 38, 1, 1
GIVE_NOTICES, WAIT_FOR_REPLIES, GO_ON = 1 << 3, 1 << 5, 1
RECEIVE, REPLY = 0xC0502100, 0xC0182101
"""Requests of ioctl for notices. WAIT_FOR_REPLIES: only the end of a process ends its wait."""
NEW_USERS, NEW_MOUNTS = 0x10000000, 0x00020000
BIND, PRIVATE_BELOW = 4096, 0x4000 | 0x40000
MOUNT_SETATTR, READ_ONLY, NO_DEVICES, ALL_BELOW, HERE = 442, 1, 4, 0x8000, -100


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _number(name: str) -> int:
    return FURTHER[name][os.uname().machine]


def _call(what: str, number: int, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    wide = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    return _checked(LIBC.syscall(ctypes.c_long(number), *wide), what)


def this_kernel() -> Kernel:
    """Find the means of this kernel. Tries a namespace, in a child, only where there is no Landlock."""
    machine = os.uname().machine
    if machine not in MACHINES:
        return Kernel(machine, 0, filters=False, namespaces=False)
    try:
        abi = _call("Landlock", LANDLOCK["create"], None, 0, 1)
    except OSError:
        abi = 0
    LIBC.syscall(ctypes.c_long(_number("seccomp")), ctypes.c_long(SET_FILTER), ctypes.c_long(0), None)
    filters = ctypes.get_errno() == errno.EFAULT  # it would have read a filter
    return Kernel(machine, abi, filters, namespaces=abi == 0 and _has_namespaces())


def _has_namespaces() -> bool:
    child = os.fork()
    if child == 0:
        try:
            _enter_namespaces("/")
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _enter_namespaces(folder: str) -> None:
    """Enter namespaces whose mounts, but `folder` and DEVICES, are read-only and without devices. Raises OSError."""
    user, group, work = os.getuid(), os.getgid(), os.getcwd()
    _checked(LIBC.unshare(NEW_USERS | NEW_MOUNTS), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    _checked(LIBC.mount(None, b"/", None, ctypes.c_ulong(PRIVATE_BELOW), None), "mount")
    kept = [place for place in (folder, *DEVICES) if place != "/" and os.path.exists(place)]
    for place in kept:
        path = os.fsencode(place)
        _checked(LIBC.mount(path, path, None, ctypes.c_ulong(BIND), None), f"mount {place}")
    _set_mount("/", ALL_BELOW, READ_ONLY | NO_DEVICES, 0)
    for place in kept:
        _set_mount(place, 0, 0, READ_ONLY if place == folder else READ_ONLY | NO_DEVICES)
    os.chdir(work)  # of the new mount: the old one is read-only


def _set_mount(place: str, flags: int, added: int, taken: int) -> None:
    attributes = struct.pack("=QQQQ", added, taken, 0, 0)
    _call(f"mount_setattr {place}", MOUNT_SETATTR, HERE, os.fsencode(place), flags, attributes, len(attributes))


def _restrict_files(folder: str, abi: int) -> None:
    """Let Landlock permit changes of files in `folder` alone, and writing to DEVICES. Raises OSError."""
    rights = file_rights(abi)
    rules = _call("Landlock", LANDLOCK["create"], struct.pack("=Q", rights), 8, 0)
    places = {folder: rights, **dict.fromkeys(filter(os.path.exists, DEVICES), rights & (WRITE_FILE | TRUNCATE))}
    for place, allowed in places.items():
        opened = os.open(place, os.O_PATH | os.O_CLOEXEC)
        _call(f"Landlock for {place}", LANDLOCK["add"], rules, 1, struct.pack("=Qi", allowed, opened), 0)
        os.close(opened)
    _call("Landlock", LANDLOCK["restrict"], rules, 0)
    os.close(rules)


def _drop_capabilities() -> None:
    """Drop all but the capability to read; no_new_privs keeps a program of root's from getting them back."""
    held, header = ctypes.create_string_buffer(24), struct.pack("=Ii", 0x20080522, 0)
    _call("capget", _number("capget"), header, held)
    effective, permitted, _, *rest = struct.unpack("=6I", held.raw)
    left = struct.pack("=6I", effective & permitted & READ_SEARCH, permitted & READ_SEARCH, *[0] * (1 + len(rest)))
    _call("capset", _number("capset"), header, left)
    _checked(LIBC.prctl(NO_NEW_PRIVILEGES, *map(ctypes.c_ulong, (1, 0, 0, 0))), "no new privileges")


def _filter_calls(program: Sequence[Instruction], flags: int) -> int:
    lines = b"".join(struct.pack("=HBBI", *line) for line in program)
    held = ctypes.create_string_buffer(lines, len(lines))
    filled = struct.pack("@HP", len(lines) // 8, ctypes.addressof(held))
    return _call("seccomp", _number("seccomp"), SET_FILTER, flags, filled)


def confine(folder: str, kernel: Kernel, asks: bool = False) -> int | None:
    """Confine this process, and all that it will start, to `folder`. Raises Refused and OSError.

    asks: before it forks; return the descriptor of its notices, None where the kernel gives it none.
    """
    way = way_of(kernel)
    for limit, most in (
        (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
        (resource.RLIMIT_DATA, MOST_MEMORY_BYTES),
        (resource.RLIMIT_NOFILE, MOST_DESCRIPTORS),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, MOST_CPU_S),
    ):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(limit, (most, most))
    if way is FileProtection.NAMESPACE:
        _enter_namespaces(folder)
    _drop_capabilities()
    if way is FileProtection.LANDLOCK:
        _restrict_files(folder, kernel.landlock)
    if asks:
        with suppress(OSError):
            return _filter_calls(program_of(kernel.machine, ASK), GIVE_NOTICES | WAIT_FOR_REPLIES)
    _filter_calls(program_of(kernel.machine), 0)
    return None


class Totals(NamedTuple):
    """The most that the processes of a group may have at once. written: bytes in their folder, and in deleted files
    that they hold open. memory: bytes of all, shared ones once. descriptors: open files, pipes and sockets.
    """

    processes: int = 500
    files: int = 10_000
    written: int = 256 << 20
    memory: int = 4 << 30
    descriptors: int = 4096


TOTALS = Totals()
MOST_FORKED = TOTALS.processes + 20
"""So many are seen to pass TOTALS. Forks that were permitted and have not happened come on top."""


def passed_limit(folder: str, group: int, most: Totals) -> str | None:
    """Return the limit that a process group has passed, as the end of a sentence; None for none."""
    members = _members(group)
    if len(members) > most.processes:
        return f"has more than {most.processes} processes at a time"
    if sum(map(_resident, members)) > most.memory and sum(map(_proportional, members)) > most.memory:
        return f"has more than {most.memory / 2**30:g} GiB of memory in all processes"
    descriptors, size = _held_open(members)
    if descriptors > most.descriptors:
        return f"has more than {most.descriptors} open files, pipes and sockets"
    files, folders = 0, [folder]
    while folders and files <= most.files and size <= most.written:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                files += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                with suppress(FileNotFoundError):
                    size += 512 * entry.stat(follow_symlinks=False).st_blocks
    if folders or files > most.files or size > most.written:
        return f"writes more than {most.files} files or {most.written >> 20} MiB"
    return None


def _members(group: int) -> list[int]:
    members = []
    for process in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):
            members += [process] if os.getpgid(process) == group else []
    return members


def _read(path: str) -> bytes:
    """Read a file of /proc; empty where the process has ended, or may not be looked at."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read()
    return b""


def _resident(process: int) -> int:
    """Memory of a process in bytes; shared pages count for each that has them."""
    fields = _read(f"/proc/{process}/statm").split()
    return int(fields[1]) * resource.getpagesize() if fields else 0


def _proportional(process: int) -> int:
    """Memory of a process in bytes; of pages that it shares, its part."""
    lines = _read(f"/proc/{process}/smaps_rollup").splitlines()
    parts = [int(line.split()[1]) << 10 for line in lines if line.startswith(b"Pss:")]
    return sum(parts) if parts else _resident(process)


def _held_open(processes: Sequence[int]) -> tuple[int, int]:
    """Return the number of descriptors of processes, and the bytes of deleted files among them."""
    number, deleted = 0, {}
    for process in processes:
        with suppress(OSError):
            names = os.listdir(f"/proc/{process}/fd")
            number += len(names)
            for name in names:
                with suppress(OSError):
                    held = os.stat(f"/proc/{process}/fd/{name}")
                    if stat.S_ISREG(held.st_mode) and held.st_nlink == 0:
                        deleted[held.st_dev, held.st_ino] = 512 * held.st_blocks
    return number, sum(deleted.values())


class _Forks:
    """Replies to the notices of forks in a group, which may have MOST_FORKED processes. at_most: called before a no."""

    def __init__(self, notices: int, group: int, at_most: Callable[[], None]) -> None:
        self._notices, self._group, self._at_most, self._left, self._counted = notices, group, at_most, 0, 0.0

    def reply(self) -> None:
        notice = bytearray(80)
        with suppress(OSError):  # the process has ended meanwhile
            fcntl.ioctl(self._notices, RECEIVE, notice)
            if self._left == 0 and time.monotonic() - self._counted > POLL_S / 4:
                self._left = max(0, MOST_FORKED - len(_members(self._group)))
                self._counted = time.monotonic()
            if self._left == 0:
                self._at_most()
            outcome = (0, GO_ON) if self._left else (-errno.EAGAIN, 0)
            self._left -= self._left > 0
            fcntl.ioctl(self._notices, REPLY, struct.pack("=8sqiI", notice[:8], 0, *outcome))


def _guard(program: int, folder: str, status: int, has_totals: bool, notices: list[int]) -> None:
    """Wait for the program; end its group with this process's parent, and with has_totals at its limits."""

    def look() -> None:
        rule = passed_limit(folder, os.getpgrp(), TOTALS) if has_totals else None
        if rule is not None:
            os.write(status, rule.encode())
            os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    _checked(LIBC.prctl(SIGNAL_OF_PARENTS_END, *map(ctypes.c_ulong, (signal.SIGTERM, 0, 0, 0))), "parent's end")
    ended, looked = os.pidfd_open(program), time.monotonic()
    forks = [_Forks(number, os.getpgrp(), look) for number in notices]
    while ended not in (ready := select.select([ended, *notices], [], [], POLL_S if has_totals else None)[0]):
        for one in forks if ready else ():
            one.reply()
        if time.monotonic() - looked >= POLL_S:
            look()
            looked = time.monotonic()
    os.waitpid(program, 0)


def main(words: Sequence[str]) -> None:
    """Start the program in a confined child, and wait for it."""
    has_totals = words[0] == "--totals"
    status, folder, *command = words[has_totals:]
    os.set_inheritable(int(status), False)
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child:
        theirs.close()
        if not has_totals:
            os.close(int(status))
        _guard(child, folder, int(status), has_totals, socket.recv_fds(ours, 1, 1)[1])
        return
    try:
        ours.close()
        notices = confine(folder, this_kernel(), asks=True)
        socket.send_fds(theirs, [READY], [] if notices is None else [notices])
        os.write(int(status), READY)
        os.execv(command[0], command)
    except (Refused, OSError) as error:
        os.write(int(status), str(error).encode(errors="replace"))
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
