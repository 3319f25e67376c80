"""The hardware file that a profile writes, and its tables and sentences. Pure."""

from __future__ import annotations

import dataclasses
import socket
from typing import Any

import yaml
from rich.table import Table

from megatron_rl.observe.summary import plain_table
from megatron_rl.planning.hardware import NOTES, TABLES, Hardware, Overheads
from megatron_rl.profile.fit import quantile
from megatron_rl.profile.profile import Measured, kept_samples

DIGITS = 4


def hardware_text(measured: Measured) -> str:
    """Return the YAML text that `load_hardware` reads."""
    content = hardware_values(measured.hardware)
    content[NOTES] = {
        "profile_seconds": rounded(measured.seconds),
        "start_up_seconds": None if measured.start_up_s is None else rounded(measured.start_up_s),
        "samples": [
            {name: value if isinstance(value, str) else rounded(value) for name, value in sample.items()}
            for sample in kept_samples(measured)
        ],
    }
    ranks = max(world.task.world_size for world in measured.worlds)
    device = measured.worlds[0].task.device
    where = (
        f"Measured by megatron-rl profile with {ranks} rank{'s' * (ranks > 1)} on {device} of {socket.gethostname()}."
    )
    comments = (f"# {where}", "# Seconds of overheads are those of a rank with a device, or a core, of its own.")
    return "\n".join((*comments, yaml.safe_dump(content, sort_keys=False, width=120)))


def hardware_values(hardware: Hardware) -> dict[str, Any]:
    """Return the keys of the file; numbers are rounded to a few digits."""
    values: dict[str, Any] = {}
    for key in (each.name for each in dataclasses.fields(Hardware)):
        value = getattr(hardware, key)
        if key in TABLES:
            values[key] = {size: rounded(seconds) for size, seconds in value.items()}
        elif isinstance(value, Overheads):
            overheads = dataclasses.asdict(value)
            values[key] = {name: rounded(seconds) for name, seconds in overheads.items() if seconds is not None}
        elif key != "name":
            values[key] = rounded(value)
    return values


def rounded(value: float) -> float:
    """Round to a few digits; integers stay."""
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def tables(measured: Measured) -> list[Table]:
    """Return the tables of the machine, of overheads, and of the short run."""
    hardware = measured.hardware
    rows = [
        ("matrix products, float32", f"{hardware.float32_flops / 1e9:.0f} GFLOP/s", "on one rank, many rows"),
        ("matrix products, bfloat16", f"{hardware.bfloat16_flops / 1e9:.0f} GFLOP/s", ""),
        ("rows at half of that", f"{hardware.half_rows:.0f}", ""),
        (
            "attention",
            f"{hardware.attention_share:.0%}",
            "share of the rate of matrix products, for 1,024 tokens",
        ),
        ("memory", f"{hardware.memory_bandwidth / 1e9:.1f} GB/s", "as in a data sheet"),
        ("between ranks", f"{hardware.link_bandwidth / 1e9:.2f} GB/s", ""),
        ("host and device", f"{hardware.host_bandwidth / 1e9:.1f} GB/s", ""),
    ]
    if hardware.parallel_ranks:
        left = f"more of them take turns, which leaves {hardware.turns_share:.0%}"
        rows.append(("ranks at a time", f"{hardware.parallel_ranks:.2f}", left))
    rows += [
        (
            f"collective of {size}",
            f"{1e6 * seconds:.0f} us",
            f"engine's {1e6 * hardware.engine_collectives[size]:.0f} us",
        )
        for size, seconds in hardware.collectives.items()
    ]
    shown = [plain_table("The machine", ("what", "measured", ""), rows), _overheads_table(hardware)]
    if measured.step is not None:
        phases = [(name, *_compared(*pair)) for name, pair in measured.phases.items()]
        phases.append(("step", *_compared(*measured.step)))
        shown.append(plain_table("A short run", ("phase", "planned", "measured", "error"), phases))
    return shown


def _overheads_table(hardware: Hardware) -> Table:
    known = dataclasses.asdict(hardware.overheads).items()
    rows = [(name, f"{1e6 * seconds:.3g} us") for name, seconds in known if seconds]
    return plain_table("On top of FLOPs and bytes", ("of", "seconds"), rows)


def _compared(planned: float, measured: float) -> tuple[str, str, str]:
    error = f"{planned / measured - 1:+.0%}" if measured else "-"
    return f"{planned:.3g} s", f"{measured:.3g} s", error


def sentences(measured: Measured) -> list[str]:
    """Return sentences: by how much estimates miss the samples, and how long the profile took."""
    missed = [abs(error) for error in measured.errors]
    lines = [
        f"the clock misses the {len(missed)} passes and generations that it was set by by {quantile(missed, 0.5):.0%} "
        f"in the median and {quantile(missed, 0.9):.0%} for nine of ten",
    ]
    if measured.start_up_s is not None:
        lines.append(f"a run takes {measured.start_up_s:.0f} s in addition to its steps")
    return [*lines, f"profiled in {measured.seconds:.0f} s"]
