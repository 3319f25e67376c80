"""Versions of adapters that `megatron-rl serve` samples beside each other, in layouts that cut them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import CommandLine
from service_client import (
    CUTS,
    ROW,
    START,
    TrainingService,
    a_pass,
    check_equal,
    copies_of_groups,
    create,
    drawn_by,
    open_start,
)
from sweeps import WEEKLY

pytestmark = [pytest.mark.slow, *WEEKLY]

RANK, SLOTS = "actor_rollout_ref.model.lora.rank=4", "actor_rollout_ref.rollout.max_loras={}"
ONE, ALL = "one", CUTS["TP2xPP2"]
LAYOUTS = {f"{layout}, 2 slots": (*overrides, RANK, SLOTS.format(2)) for layout, overrides in CUTS.items()}
LAYOUTS["TP2xPP2, 4 slots"] = (*ALL, RANK, SLOTS.format(4))
LAYOUTS["TP2xPP2 to TP1, 3 slots"] = (
    *ALL,
    RANK,
    SLOTS.format(3),
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
)
TRAINED = (("anna", ROW, 2), ("bert", (9, 10, 14, 7, 4, 15, 5, 9, 1), 1))
"""Tenant, row, steps."""
SAMPLERS = {"session-0:sample:0": "anna", "session-0:sample:1": "anna", "session-1:sample:0": "bert", START: "anna"}


@contextmanager
def opened(folder: Path, *overrides: str) -> Iterator[TrainingService]:
    """A service with two models that have trained, a version after each step, and a sampler of the start."""
    folder.mkdir()
    service = TrainingService(folder, *overrides)
    try:
        for tenant, row, steps in TRAINED:
            model = create(service, tenant, 4)
            for step in range(steps):
                number = 3 * step + 1
                service.done("forward_backward", a_pass(model, number, row=row), tenant)
                adam = {"model_id": model, "seq_id": number + 1, "adam_params": {"learning_rate": 0.02}}
                service.done("optim_step", adam, tenant)
                saved = {"model_id": model, "seq_id": number + 2, "sampling_session_seq_id": step}
                service.done("save_weights_for_sampler", saved, tenant)
        open_start(service)
        yield service
    finally:
        service.line.kill_all()


@pytest.mark.timeout(3600)
def test_layouts_sample_versions_alike(tmp_path: Path) -> None:
    """Three versions and the start, asked at once with as many slots or fewer, have the tokens and log-probs (5e-5) of
    one process that puts one after the other into the actor's place. In one layout the journal repeats bit for bit.

    Would not catch an error of weights that are put in place, which other tests compare with the trainer's log-probs.
    """
    one = (*CUTS["one"], RANK)
    with opened(tmp_path / ONE, *one) as service:
        alone = drawn_by(service, SAMPLERS, 7, stop=[1])
        greedy = drawn_by(service, SAMPLERS, 8, temperature=0.0)
        assert len({str(sequences) for sequences in alone.values()}) == len(SAMPLERS)
    for layout, overrides in LAYOUTS.items():
        with opened(tmp_path / layout, *overrides) as service:
            check_equal(alone, drawn_by(service, SAMPLERS, 7, stop=[1]))
            check_equal(greedy, drawn_by(service, SAMPLERS, 8, temperature=0.0))
            num_slots = int(re.search(r"(\d) slots", layout)[1])
            assert max(copies_of_groups(service)) == num_slots, layout
            service.line.process.send_signal(signal.SIGTERM)
            assert service.line.wait() == 0, service.line.text()
        if layout == "TP2, 2 slots":
            (tmp_path / "again").mkdir()
            journal = str(service.line.run / "journal")
            again = CommandLine(tmp_path / "again", "--replay", journal, *overrides, stage="serve")
            assert again.wait(timeout=600) == 0, again.text()
            number, all_replies = re.search(r"(\d+) of (\d+) replies are the same, bit for bit", again.text()).groups()
            assert number == all_replies and int(number) > len(SAMPLERS) * 2
