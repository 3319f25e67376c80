"""Entering and leaving rollout mode, with stand-ins for the weights and the generator."""

import random

import numpy as np
import pytest
import torch

from megatron_rl.device import Device
from megatron_rl.hybrid_engine.allgather_pp import Bytes
from megatron_rl.hybrid_engine.hybrid_engine import HybridEngine


class RecordingWeights:
    """Keeps a journal and says whether its memory is there."""

    lower_bound = Bytes(12, 8)

    def __init__(self, journal):
        self.journal = journal
        self.is_present = False
        self.fails_in = None

    def note(self, event):
        self.journal.append(event)
        if self.fails_in == event:
            raise OSError("peer is gone")

    def gather(self):
        self.is_present = True
        self.note("gather")
        return Bytes(12, 8)

    def verify(self):
        self.note("verify")

    def drop_training(self):
        self.note("drop")

    def restore_training(self):
        self.note("restore")

    def release(self):
        self.journal.append("release")
        self.is_present = False


class RecordingOffloadable:
    """Keeps a journal."""

    def __init__(self, journal, name):
        self.journal = journal
        self.name = name

    def offload(self):
        self.journal.append(f"{self.name} leaves")

    def reload(self):
        self.journal.append(f"{self.name} is back")


class RecordingGenerator:
    """Keeps a journal and says whether it is awake."""

    def __init__(self, journal):
        self.journal = journal
        self.is_awake = False
        self.fails = False

    def wake(self):
        self.journal.append("wake")
        self.is_awake = True
        if self.fails:
            raise RuntimeError("still running")

    def sleep(self):
        self.journal.append("sleep")
        self.is_awake = False
        if self.fails:
            raise RuntimeError("still running")


@pytest.fixture
def journal():
    return []


@pytest.fixture
def engine(journal):
    return HybridEngine(RecordingWeights(journal), RecordingGenerator(journal), Device("cpu"))


ENTER = ["gather", "verify", "drop", "wake"]
EXIT = ["sleep", "restore", "release"]


@pytest.fixture(autouse=True)
def fresh_generators():
    """Seeds every global generator, and puts the test process's state back."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    yield
    random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])


def draw():
    """One number from each global generator of the process."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_weights_before_cache_and_back(engine, journal):
    """The order of calls, and the report. Would not catch a wrong order among ranks."""
    report = engine.enter()
    assert journal == ENTER and engine.in_rollout
    assert (report.bytes_received, report.lower_bound_bytes) == (12, 12)
    assert (report.network_bytes, report.network_bound_bytes) == (8, 8) and report.seconds >= 0
    engine.exit()
    assert journal == ENTER + EXIT and not engine.in_rollout


def test_enter_twice_is_an_error(engine, journal):
    """It says what is missing, and rollout mode goes on. Would not catch two engines on one memory."""
    engine.enter()
    with pytest.raises(RuntimeError, match="exit"):
        engine.enter()
    assert journal == ENTER and engine.in_rollout


def test_exit_in_train_mode_does_nothing(engine, journal):
    """Before any enter and after an exit. Would not catch an exit that is never called."""
    engine.exit()
    assert journal == []
    engine.enter()
    engine.exit()
    stream = torch.get_rng_state()
    engine.exit()
    assert journal == ENTER + EXIT
    assert torch.equal(torch.get_rng_state(), stream)


def test_offloaded_memory_leaves_first_and_is_back_last(journal):
    """In reverse order, also when gathering fails. Would not catch memory that is not restored exactly."""
    offloaded = [RecordingOffloadable(journal, name) for name in ("a", "b")]
    engine = HybridEngine(RecordingWeights(journal), RecordingGenerator(journal), Device("cpu"), offloaded)
    engine.enter()
    engine.exit()
    assert journal == ["a leaves", "b leaves", *ENTER, *EXIT, "b is back", "a is back"]
    journal.clear()
    engine.weights.fails_in = "gather"
    with pytest.raises(OSError, match="gone"):
        engine.enter()
    assert journal == ["a leaves", "b leaves", "gather", "release", "b is back", "a is back"]


@pytest.mark.parametrize(("every", "verified"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (3, [0, 3])])
def test_every_nth_entry_is_verified(journal, every, verified):
    """The first in any case, also with 0. Would not catch a cost that is not reported."""
    engine = HybridEngine(RecordingWeights(journal), RecordingGenerator(journal), Device("cpu"), verify_every=every)
    found = []
    for number in range(5):
        journal.clear()
        engine.enter()
        engine.exit()
        found += [number] if "verify" in journal else []
    assert found == verified


def test_nothing_is_generated_from_wrong_weights(engine, journal):
    """A failing verification comes before the KV cache. Would not catch one that passes wrongly."""
    engine.weights.fails_in = "verify"
    with pytest.raises(OSError, match="gone"):
        engine.enter()
    assert journal == ["gather", "verify", "release"] and not engine.in_rollout


@pytest.mark.parametrize("culprit", ["gather", "verify", "drop", "generator"])
def test_failed_enter_leaves_train_mode(engine, culprit):
    """Memory released, RNG untouched, the next enter works. Would not catch a failure on another rank only."""
    expected = [draw() for _ in range(2)]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draw() == expected[0]

    engine.weights.fails_in, engine.generator.fails = culprit, culprit == "generator"
    with pytest.raises((RuntimeError, OSError), match=r"running|gone"):
        engine.enter()
    assert not engine.in_rollout and not engine.weights.is_present and not engine.generator.is_awake
    assert draw() == expected[1]

    engine.weights.fails_in, engine.generator.fails = None, False
    engine.enter()
    assert engine.in_rollout and engine.weights.is_present and engine.generator.is_awake


def test_failed_exit_ends_in_train_mode_once(engine, journal):
    """Memory released, and a second exit does not rewind training's stream. Would not catch a cache that stays."""
    expected = [draw() for _ in range(3)]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    numbers = [draw()]
    engine.enter()
    draw()
    engine.generator.fails = True
    with pytest.raises(RuntimeError, match="running"):
        engine.exit()
    assert not engine.in_rollout and not engine.weights.is_present
    numbers.append(draw())
    engine.exit()
    numbers.append(draw())
    assert numbers == expected and journal.count("release") == 1


@pytest.mark.parametrize("draws_in_rollout", [0, 1, 5])
def test_rollout_draws_do_not_move_the_training_stream(engine, draws_in_rollout):
    """Training draws the same four numbers whatever generation drew. Would not catch CUDA generators."""
    expected = [draw() for _ in range(4)]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    numbers = []
    for _ in range(4):
        numbers.append(draw())
        engine.enter()
        for _ in range(draws_in_rollout):
            draw()
        engine.exit()
    assert numbers == expected


def test_training_draws_do_not_move_the_rollout_stream(journal):
    """Generation goes on where it stopped, however much training drew. Would not catch CUDA generators."""

    def rollout_numbers(draws_in_training):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        engine = HybridEngine(RecordingWeights(journal), RecordingGenerator(journal), Device("cpu"))
        numbers = []
        for _ in range(3):
            engine.enter()
            numbers.append(draw())
            engine.exit()
            for _ in range(draws_in_training):
                draw()
        return numbers

    numbers = rollout_numbers(draws_in_training=0)
    assert rollout_numbers(draws_in_training=3) == numbers
    assert len(set(numbers)) == 3
