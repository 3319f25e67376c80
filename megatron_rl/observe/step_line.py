"""The line that the console shows for a step: its most telling metrics, in at most 100 columns, and the time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping

from rich.markup import escape

from megatron_rl.observe.terminal import terminal_text

WIDTH = 100
"""Columns of a line; metrics.jsonl has the metrics that find no room."""
ROOM_FOR_TIME = 18
"""Columns kept for seconds and the time left, so that every step shows the same metrics."""
RECENT_STEPS = 10
"""Steps over which the seconds of a step are averaged: one with a validation or a checkpoint takes longer."""
HELD_OUT = "val-core/"
FIELDS = (
    ("critic/score/mean", "reward", ".3f"),
    ("actor/loss", "loss", ".4f"),
    ("critic/loss", "loss", ".4f"),
    ("actor/accuracy", "right", ".1%"),
    ("critic/accuracy", "right", ".1%"),
    ("val/loss", "held out", ".4f"),
    ("val/accuracy", "right", ".1%"),
    ("distillation/loss", "distill", ".4f"),
    ("actor/reward_kl_penalty", "kl", ".4f"),
    ("actor/entropy", "entropy", ".3f"),
    ("actor/grad_norm", "grad", ".2f"),
    ("response_length/mean", "len", ".1f"),
    ("training/rollout_logprob_diff_max", "logp_diff", ".0e"),
    ("actor/pg_clipfrac", "clip", ".1%"),
    ("critic/vf_loss", "vf_loss", ".4f"),
    ("actor/pg_loss", "pg_loss", "+.4f"),
    ("perf/throughput", "tok/s/rank", ".0f"),
)
"""Metric, its label, and its form; the first ones are shown where not all have room."""


class TimeLeft:
    """Estimates how long the steps that are left will take, by the last `RECENT_STEPS`. clock: in seconds."""

    def __init__(self, num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps, self._clock = num_steps, clock
        self._began: float | None = None
        self._seconds: deque[float] = deque(maxlen=RECENT_STEPS)

    def begin_step(self) -> None:
        """A step begins; only the first one of this process counts, as the others begin where one has ended."""
        if self._began is None:
            self._began = self._clock()

    def after(self, step: int) -> float | None:
        """Return the seconds that are left when `step` has ended; None before the first step."""
        if self._began is None:
            return None
        now = self._clock()
        self._seconds.append(now - self._began)
        self._began = now
        return sum(self._seconds) / len(self._seconds) * (self._num_steps - step)


def brief(seconds: float) -> str:
    """Return a duration as `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def step_line(
    metrics: Mapping[str, float], step: int, num_steps: int | None = None, seconds_left: float | None = None
) -> str:
    """Return a step's line in rich's markup. num_steps: of the run, None where it has no end.

    Metrics that are absent are left out, and so are the first that finds no room and all behind it.
    """
    place = f"step {step}" if num_steps is None else f"step {step:>{len(str(num_steps))}}/{num_steps}"
    last = [f"{metrics['timing_s/step']:.1f} s"] if "timing_s/step" in metrics else []
    last += [f"{brief(seconds_left)} left"] if seconds_left else []
    room = WIDTH - len(place) - max(ROOM_FOR_TIME, len("".join(f"  {text}" for text in last)))
    parts = []
    for label, value, style in _fields(metrics):
        room -= len(f"  {terminal_text(label)} {value}")
        if room < 0:
            break
        parts.append(f"[{style}]{escape(label)}[/] {value}")
    return "  ".join((f"[bold]{place}[/]", *parts, *last))


def _fields(metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
    """(label, value, style) of all that may be shown: held-out metrics, which only some steps have, come first."""
    held_out = [name for name in metrics if name.startswith(HELD_OUT) and not name.endswith("/std")]
    labels = [name.removeprefix(HELD_OUT) for name in held_out]
    if len(labels) == 1:  # SOURCE/VARIABLE/KIND: there is nothing to tell the source from
        labels = [f"held-out {labels[0].split('/')[-2]}"]
    fields = [(label, f"{metrics[name]:.3f}", "green") for name, label in zip(held_out, labels, strict=True)]
    return fields + [(label, f"{metrics[name]:{form}}", "dim") for name, label, form in FIELDS if name in metrics]
