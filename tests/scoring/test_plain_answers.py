"""What a reward function returns or raises reaches keeper and driver as plain numbers and texts, or as a failure."""

import math
import time

import pytest

from megatron_rl.scoring.function import RewardSource
from megatron_rl.scoring.outcome import Outcome, Sample, failed, score_sample
from megatron_rl.scoring.reward_processes import RewardProcesses
from megatron_rl.user_code.worker import GarbledError, message_of, read_message

pytestmark = pytest.mark.timeout(60)

CLASSES = """
import os, pathlib, time
HERE = pathlib.Path(__file__).parent

class Text(str):
    def __str__(self): return self
class Number(float): ...
class Trap(str):
    def __reduce__(self): return os.mkdir, (str(HERE / f"made by {os.getpid()}"),)
class Mute(Exception):
    def __str__(self): raise self
class Sleeper(Exception):
    def __str__(self): time.sleep(1000)
class Hidden:
    def __repr__(self): raise SystemExit
class Own(BaseException): ...
class list_: ...
class Array:
    def __float__(self): raise RuntimeError("two elements")
list_.__name__ = "list"

def throw(error): raise error
def fork():
    if os.fork() == 0: return 0.25
    time.sleep(0.1)
    return 0.5
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return eval(solution_str)
"""
RESULTS = {
    "{'score': 1, 'pred': Text('x')}": Outcome(1.0, {"pred": "x"}),
    "{'score': Number(1), Text('n'): Number(2), 5: True}": Outcome(1.0, {"n": 2.0, "5": 1.0}),
    "{'score': 1, 'pred': Trap('x')}": Outcome(1.0, {"pred": "x"}),
    "{Text('score'): 2, 'pred': 'a' + chr(0xD800)}": Outcome(2.0, {"pred": "a\\ud800"}),
    "{'score': 1, 'many': Array(), 'huge': 10**400, 'nan': float('nan'), 'list': [1]}": Outcome(1.0),
    "{'score': 1, 'pred': 'x' * 10**7}": Outcome(1.0, {"pred": f"{'x' * 50_000}...{'x' * 50_000}"}),
}
FAILURES = {
    "throw(Mute())": ("raised", "Mute, which cannot be shown as text"),
    "throw(Own())": ("raised", "raised Own"),
    "throw(ValueError('x' * 10**6))": ("raised", "ValueError: xxx"),
    "throw(ValueError(chr(0xD800)))": ("raised", "ValueError: \\ud800"),
    "throw(Sleeper())": ("timed_out", "timeout_s"),
    "Array()": ("no_score", "returned <"),
    "Hidden()": ("no_score", "returned an object of type Hidden, which cannot be shown"),
    "list_()": ("no_score", "returned an object of type list, which cannot be shown"),
    "10**5000": ("no_score", "returned an object of type int, which cannot be shown"),
    "{'score': 1} | {str(n): 'x' * 90_000 for n in range(200)}": ("no_score", "a reply may take"),
}


@pytest.fixture
def processes(tmp_path):
    path = tmp_path / "my_reward.py"
    path.write_text(CLASSES)
    source = RewardSource(str(path), "compute_score")
    with RewardProcesses(source, num_workers=1, timeout_s=2.0, give_up=True) as processes:
        yield processes


def score(processes, *answers):
    return processes.score([Sample("unit", answer, "ab", {}) for answer in answers])


def test_results_cross_as_plain_values(processes, tmp_path):
    """Objects of the user's classes, of which keeper and driver know nothing; no `__reduce__` of theirs is run.

    Would not catch a class that hides from isinstance.
    """
    outcomes = score(processes, *RESULTS)
    assert outcomes == list(RESULTS.values())
    texts = [text for outcome in outcomes for pair in outcome.extras.items() for text in pair]
    assert {type(text) for text in texts} == {str, float} and {type(outcome.score) for outcome in outcomes} == {float}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and "made" in path.name] == []


def test_what_cannot_cross_costs_one_sample(processes):
    """Exceptions and results that cannot be shown, are huge, or are no Unicode, among good ones.

    Would not catch what kills the worker itself; `test_reward_processes` does.
    """
    outcomes = score(processes, *(text for bad in FAILURES for text in ("1", bad)))
    assert [outcome.score for outcome in outcomes[::2]] == [1.0] * len(FAILURES)
    for outcome, (kind, reason) in zip(outcomes[1::2], FAILURES.values(), strict=True):
        assert outcome.failure == kind and reason in outcome.reason and len(outcome.reason) < 3000
        assert outcome.reason.encode()


def test_answers_of_a_forked_copy_are_not_taken(processes):
    """The function returns in two processes: one of both answers counts, and no row has another's score.

    Would not catch a copy that answers only after its worker is gone, which nobody hears.
    """
    outcomes = score(processes, "1", "fork()", "2", "3")
    assert [outcome.score for outcome in (outcomes[0], *outcomes[2:])] in ([1.0, 2.0, 3.0], [1.0, None, 3.0])
    assert outcomes[1].score in (0.25, 0.5)
    assert [outcome.failure for outcome in outcomes[2:]] in (["", ""], ["crashed", ""])
    # The second answer may come only now, and costs the row that is being scored.
    deadline = time.monotonic() + 60
    while (later := score(processes, "4")[0].score) is None and time.monotonic() < deadline:
        pass
    assert later == 4.0


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 100_000,
        b'[0, [NaN, {}, "", ""]]',
        b'[0, [1.0, {}, "crashed", ""]]',
        b'[0, [null, {}, "", ""]]',
        b'[0, [1.0, {"a": [1]}, "", ""]]',
        b'["0", [1.0, {}, "", ""]]',
        b'[0, [null, {}, "lost", ""]]',
        b"[0, 1.0]",
    ],
)
def test_lines_that_no_worker_sends(line):
    """A line, or the outcome in it. Would not catch a forged answer for the right row."""
    with pytest.raises((GarbledError, ValueError)):
        RewardSource(None, "math").read(read_message(line)[1])


def test_answers_are_the_same_after_the_wire():
    """Would not catch what a channel does to its bytes."""
    source = RewardSource(None, "math")
    for outcome in (Outcome(0.1, {"a": -1e300, "b": "\n\u2028é"}), failed("raised", 'a "reason"'), Outcome(math.pi)):
        number, content = read_message(message_of((3, source.written(outcome))))
        assert (number, source.read(content)) == (3, outcome)


def test_scores_of_other_libraries():
    """Would not catch a library whose numbers are texts."""
    import numpy
    import torch

    sample = Sample("unit", "", "", {})
    results = {"score": torch.tensor(0.5), "acc": numpy.float32(1), "vector": torch.tensor([1.0, 2.0])}
    assert score_sample(lambda **_: results, sample) == Outcome(0.5, {"acc": 1.0})
