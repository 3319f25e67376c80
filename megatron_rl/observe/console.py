"""Output of a process: what nobody reads is dropped without an error, and libraries' chatter is silenced.

Notices of libraries that a user cannot act on are listed, each by its text, with the reason why it is not shown.
Whatever is not in these tables is shown, and errors always are.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import warnings
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TextIO


class Silenced(NamedTuple):
    """A warning. message: a regular expression that its text begins with."""

    message: str
    category: type[Warning]
    reason: str


WARNINGS = (
    Silenced(
        r"(Transformer Engine and )?Apex (is|are) not installed",
        UserWarning,
        "Megatron takes torch's kernels instead, and the plan refuses by name what needs the others",
    ),
    Silenced("MimoModelConfig is experimental", UserWarning, "Megatron imports a model that no run here builds"),
    Silenced("full scope is deprecated", UserWarning, "Megatron's own default of a key that no run here sets"),
    Silenced(
        r"`torch\.distributed\.\w+` is deprecated",
        FutureWarning,
        "Megatron and vLLM call it; requirements/ pins the torch that still has it",
    ),
    Silenced(
        "`load_state_dict` is deprecated and will be removed",
        FutureWarning,
        "Megatron calls it of torch.distributed.checkpoint at every resume; requirements/ pins the torch that has it",
    ),
    Silenced(
        "torch.distributed is disabled, unavailable or uninitialized",
        UserWarning,
        "`export` and `average` read a checkpoint in one process on purpose",
    ),
)
NOTICES = {
    "megatron.core.models.gpt.gpt_model": (
        "GPTModel IS DEPRECATED",
        "Megatron still maintains it; no setting changes it",
    ),
    "megatron.core.distributed.distributed_data_parallel": (
        "DistributedDataParallel: full_param_layout not provided",
        "Megatron makes the layout itself",
    ),
    "megatron.core.dist_checkpointing.strategies.torch": (
        "MCore's async save is deprecated",
        "the other writer needs a package that the index does not have",
    ),
    "megatron.core.dist_checkpointing.strategies.common": (
        "load_common is deprecated",
        "checkpoints of Megatron 0.16 are read on purpose",
    ),
}
"""Logger of a library -> (beginning of a notice, why it is not shown)."""
LOGGERS = {
    "torch.fx._symbolic_trace": "a notice about torch's own interface, for its developers",
    "torch.utils.cpp_extension": "looks for a compiler for CUDA when it is imported, where nothing is compiled",
    "torch._library.triton": "says that a kernel has no GPU here, where none is used",
}
"""Logger of a library -> why only its errors are shown."""


def silence_libraries() -> None:
    """Show none of `WARNINGS` and `NOTICES`, and only errors of `LOGGERS`; call it before libraries are imported."""
    for silenced in WARNINGS:
        warnings.filterwarnings("ignore", message=silenced.message, category=silenced.category)
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, (beginning, _) in NOTICES.items():
        logging.getLogger(name).addFilter(partial(_begins_otherwise, beginning))


def _begins_otherwise(beginning: str, record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(beginning)


STANDARD = (0, 1, 2)
"""stdin, stdout and stderr, which the files of a program must never become."""
NOBODY_READS = (errno.EPIPE, errno.EIO, errno.EBADF)
"""Errors of writing to a closed pipe, a closed terminal and a closed descriptor."""


def drop_unread_output() -> None:
    """Make writes to stdout and stderr of this process never raise; call it before anything is printed.

    Output is dropped that cannot be written: to a closed pipe (`| head -1`), a closed terminal, a full disk behind
    `> file` or a descriptor that was never open (`>&-`). Characters that the encoding does not have are written as
    escapes. A stream that replaced the interpreter's own is left alone.
    """
    _fill_closed()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        if stream is None:  # the descriptor was closed when the interpreter started; it may be another file by now
            replacement = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", errors="backslashreplace")
        else:
            with suppress(OSError):
                stream.flush()
            replacement = _forgiving(stream, descriptor)
        setattr(sys, name, replacement)
        setattr(sys, f"__{name}__", replacement)


def lost_output(stream: TextIO) -> OSError | None:
    """The error that lost output of which a reader remains, such as a full disk behind `> file`; None without one."""
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    return getattr(getattr(buffer, "raw", buffer), "lost", None)


class _Forgiving(io.FileIO):
    """A descriptor whose writes never fail: it drops what cannot be written, and keeps the error in `lost`."""

    lost: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NOBODY_READS:
                self.lost = error
            return memoryview(data).nbytes


def _forgiving(stream: io.TextIOWrapper, descriptor: int) -> io.TextIOWrapper:
    raw = _Forgiving(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors="backslashreplace" if stream.errors == "strict" else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _fill_closed() -> None:
    """Open the closed ones of `STANDARD`: otherwise the next file would get such a number, and printed text with it."""
    opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    while opened in STANDARD:
        os.set_inheritable(opened, True)
        opened = os.open(os.devnull, os.O_RDWR)
    os.close(opened)


def quiet_libraries() -> None:
    """Silence progress bars of `transformers`, and what this module lists; call it before loading libraries."""
    silence_libraries()
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
