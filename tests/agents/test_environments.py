"""Environments of the user's, in this process and in processes of their own: answers, failures, kills, repetition."""

from __future__ import annotations

import os
import pickle
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_rl.agents.environment_host import TurnJob
from megatron_rl.agents.environment_source import ClassSource, EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, Observation, TextLimit, Turn, observation_of
from megatron_rl.errors import ConfigError

pytestmark = pytest.mark.timeout(120)

COUNTING = """
import asyncio, os, time
from megatron_rl.agents.observation import EpisodeError, Observation, Opening
def begins(schema):
    return Observation(anew=Opening(({"role": "user", "content": "x"},), (schema,)))
def deep(levels):
    value = 1
    for _ in range(levels): value = [value]
    return value
def refuse():
    raise EpisodeError("no cause", "\\ud83d")
class Environment:
    def __init__(self, start=0): self.total = start
    def reset(self, row): self.total += row["extra_info"].get("start", 0)
    def step(self, turn):
        self.total += 1
        return eval(turn.text)
"""
ASLEEP = """
import asyncio
class Environment:
    async def reset(self, row): self.number = row["index"]
    async def step(self, turn):
        await asyncio.sleep(0.5)
        return f"{self.number} {turn.text}", 0.5, False
"""
OPENS = """
from megatron_rl.agents.observation import Observation
class Environment:
    def reset(self, row): self.text = row["prompt"]
    def opening(self): return self.text
    def step(self, turn): return self.text, 1.0, False
"""
TOLD = """
from megatron_rl.agents.observation import Observation
class Environment:
    def reset(self, row): self.said = []
    def step(self, turn):
        self.said.append(turn.text)
        return "more", 0.25, False
    def cut(self, turn):
        assert turn.is_cut and turn.num_tokens == 3, turn
        return eval(turn.text, {"said": self.said, "Observation": Observation})
"""
ONE_HANGS = """
import {module} as way
class Environment:
    {how}def reset(self, row): self.number = row["index"]
    {how}def step(self, turn):
        if self.number == 100:
            {wait}way.sleep(1000)
        return "x" * 4000, 1.0, False
"""
SAID = ({"role": "user", "content": "1"},)
BAD = {
    "1 / 0": ("raised", "ZeroDivisionError"),
    "None": ("no_answer", "it returned None"),
    "('a', float('nan'), False)": ("no_answer", "must be a finite number"),
    "('a', 0.0, 1)": ("no_answer", "done must be True or False"),
    "(7, 0.0, False)": ("no_answer", "an observation must be a text"),
    "([{'role': 'assistant', 'content': 'x'}], 0.0, False)": ("no_answer", "an observation must be a text"),
    "Observation((), 0.0, False, {'n': 'x'})": ("no_answer", "the count n of a step must be a finite number"),
    "('\\ud83d', 0.0, False)": ("no_answer", "half of a surrogate pair, U+D83D, which UTF-8 cannot write"),
    "begins({'maximum': float('nan')})": ("no_answer", "Out of range float values"),
    "begins({'maximum': object()})": ("no_answer", "cannot be sent as JSON"),
    "begins({'items': deep(101)})": ("no_answer", "may be nested 100 levels deep"),
    "begins({'items': deep(100_000)})": ("no_answer", "cannot be sent as JSON"),
    "refuse()": ("raised", "\\ud83d"),
    "exec('import sys; sys.exit(7)')": ("raised", "SystemExit: 7"),
    "exec('raise KeyboardInterrupt')": ("raised", "KeyboardInterrupt"),
    "asyncio.sleep(0)": ("raised", "try: async def step"),
    "os._exit(3)": ("crashed", "exited with code 3"),
    "time.sleep(1000)": ("timed_out", "multi_turn.tool_timeout_s=1"),
}


def source(folder: Path, text: str = COUNTING, **kwargs: object) -> ClassSource:
    (folder / "env.py").write_text(text)
    return ClassSource(str(folder / "env.py"), "Environment", "environment.path", kwargs, TextLimit(100))


def job(episode: int, text: str, *before: tuple[Turn, Observation], start: int = 0) -> TurnJob:
    return TurnJob(episode, {"index": episode, "extra_info": {"start": start}}, before, Turn(text))


def turns(number: int, num_bytes: int) -> list[TurnJob]:
    rows = ({"index": episode, "prompt": "x" * num_bytes} for episode in range(number))
    return [TurnJob(row["index"], row, (), Turn("go")) for row in rows]


def play(environments: EnvironmentProcesses | EnvironmentsHere, *jobs: TurnJob) -> list[Observation | EpisodeFailure]:
    for number, each in enumerate(jobs):
        environments.play(number, each)
    answers: dict[int, Observation | EpisodeFailure] = {}
    while len(answers) < len(jobs):
        answers.update(environments.take(waits=True))
    return [answers[number] for number in range(len(jobs))]


@pytest.mark.parametrize(
    ("given", "end"),
    [
        ("len(said) / 2", Observation((), 0.5, True)),
        ("None", Observation((), 0.0, True)),
        ("('ignored', 2.0, False)", Observation((), 2.0, True)),
        ("Observation((), 1, False, {'left': 2})", Observation((), 1.0, True, {"left": 2.0})),
        ("'good'", "no_answer"),
        ("float('nan')", "no_answer"),
        ("said[7]", "raised"),
    ],
)
def test_an_environment_is_told_that_its_episode_is_over(tmp_path, given: str, end):
    """`cut` gets the turn that was cut, and gives the last reward: here, and in a process where another environment
    plays the turn before again. Would not catch a run that never calls it; a run of test_agent_runs.py does.
    """
    told = source(tmp_path, TOLD)
    before = (Turn("1"), Observation(({"role": "user", "content": "more"},), 0.25))
    over = replace(job(1, "", before), turn=Turn(given, num_tokens=3, is_cut=True), is_over=True)
    assert told.host().hears_cuts and not source(tmp_path).host().hears_cuts
    source(tmp_path, TOLD)
    with EnvironmentsHere(told.host()) as here, EnvironmentProcesses(told, 1, 60.0, hears_cuts=True) as processes:
        for environments in (here, processes):
            [got] = play(environments, over)
            assert (
                got == end
                or isinstance(got, EpisodeFailure)
                and (got.cause, "cut" in got.reason)
                == (
                    end,
                    end == "no_answer",
                )
            ), got


NEXT = "(str(self.total), 0.25, False)"


def test_an_environment_lives_from_turn_to_turn(tmp_path):
    """Here and in processes: one object per episode, made with the kwargs, reset with the row. Would not catch a reset
    between two turns that leaves everything as it was.
    """
    with EnvironmentProcesses(source(tmp_path, start=10), 2, 5.0) as processes:
        for environments in (processes, EnvironmentsHere(source(tmp_path, start=10).host())):
            first = play(environments, *(job(number, NEXT, start=number) for number in range(4)))
            assert [answer.messages[0]["content"] for answer in first] == ["11", "12", "13", "14"]
            again = play(environments, *(job(n, NEXT, (Turn(NEXT), first[n]), start=n) for n in range(4)))
            assert [answer.messages[0]["content"] for answer in again] == ["12", "13", "14", "15"]
            assert {answer.reward for answer in again} == {0.25}


def test_later_turns_carry_neither_their_row_nor_the_turns_before(tmp_path):
    """Four turns of an environment whose row has 100 kB: the third and fourth job are small, and play on; after its
    process was killed the whole job plays all turns again, and a turn that the process has not seen is found out.
    Would not catch an environment that says the same after other turns.
    """
    row, before = {"index": 0, "extra_info": {"start": 5}, "prompt": "x" * 100_000}, ()
    with EnvironmentProcesses(source(tmp_path), 1, 100.0) as processes:
        for place in range(6):
            if place == 4:
                for child in psutil.Process(processes._supervisor.pid).children():
                    os.kill(child.pid, signal.SIGKILL)
            whole = TurnJob(0, row, before, Turn(NEXT))
            assert (len(pickle.dumps(whole.short())) < 2000) == (place >= 2)
            (answer,) = play(processes, whole)
            assert answer.messages[0]["content"] == str(6 + place)
            before = (*before, (Turn(NEXT), answer))
        other = (*before[:2], (Turn(NEXT), Observation(SAID, 0.25)))
        (answer,) = play(processes, TurnJob(0, row, other, Turn(NEXT)))
    assert isinstance(answer, EpisodeFailure) and answer.cause == "not_repeatable"


def test_every_kind_of_failure_costs_one_episode(tmp_path):
    """Bad answers among good ones in two processes; the good ones' environments are played again where their process
    was killed. Would not catch a failure while the file is loaded; the keeper's own tests do.
    """
    jobs = [each for n, bad in enumerate(BAD) for each in (job(2 * n, NEXT), job(2 * n + 1, bad))]
    with EnvironmentProcesses(source(tmp_path), 2, 1.0) as processes:
        answers = play(processes, *jobs)
        again = play(processes, *(job(2 * n, NEXT, (Turn(NEXT), answers[2 * n])) for n in range(len(BAD))))
    assert all(answer == Observation(SAID, 0.25) for answer in answers[::2])
    for answer, (cause, reason) in zip(answers[1::2], BAD.values(), strict=True):
        assert isinstance(answer, EpisodeFailure) and answer.cause == cause and reason in answer.reason
    assert [answer.messages[0]["content"] for answer in again] == ["2"] * len(BAD)


def test_a_count_without_a_name_is_no_reward():
    """Would not catch two counts of one name, which a dict cannot have."""
    answer = observation_of(Observation((), 1.0, False, {"": 5.0, "n": 2}), TextLimit(9))
    assert answer == Observation((), 1.0, False, {"": 5.0, "n": 2.0})


def test_a_lost_environment_is_played_again_and_must_answer_as_before(tmp_path):
    """By hand: a fresh host with a turn that is recorded as it was, and one recorded otherwise."""
    right = job(1, NEXT, (Turn(NEXT), Observation(SAID, 0.25)))
    wrong = job(2, NEXT, (Turn(NEXT), Observation(({"role": "user", "content": "8"},), 0.25)))
    answers = play(EnvironmentsHere(source(tmp_path).host()), right, wrong)
    assert answers[0] == Observation(({"role": "user", "content": "2"},), 0.25)
    assert isinstance(answers[1], EpisodeFailure) and answers[1].cause == "not_repeatable"


def test_async_environments_wait_side_by_side(tmp_path):
    """Forty turns of half a second in one process, here and elsewhere. Would not catch a bound on how many."""
    of = source(tmp_path, ASLEEP)
    with EnvironmentProcesses(of, 1, 20.0) as processes, EnvironmentsHere(of.host()) as here:
        play(processes, job(99, "loaded"))
        for environments in (processes, here):
            start = time.monotonic()
            answers = play(environments, *(job(number, "x") for number in range(40)))
            assert time.monotonic() - start < 10
            assert [answer.messages[0]["content"] for answer in answers] == [f"{number} x" for number in range(40)]
            assert answers[3] == Observation(({"role": "user", "content": "3 x"},), 0.5)


def test_a_killed_process_is_replaced_and_so_is_a_killed_keeper(tmp_path):
    """SIGKILL of the only worker while it is at a turn: that episode has failed, and the next turn of another is played
    in a new process. Would not catch a kill between two turns, which costs nothing.
    """
    with EnvironmentProcesses(source(tmp_path), 1, 100.0) as processes:
        (first,) = play(processes, job(0, NEXT))
        processes.play(7, job(1, "time.sleep(1000)"))
        keeper = psutil.Process(processes._supervisor.pid)
        deadline = time.monotonic() + 60
        while not any(child.status() == "sleeping" for child in keeper.children()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        for child in keeper.children():
            os.kill(child.pid, signal.SIGKILL)
        [(number, answer)] = processes.take(waits=True)
        assert number == 7 and isinstance(answer, EpisodeFailure) and answer.cause == "crashed"
        (second,) = play(processes, job(0, NEXT, (Turn(NEXT), first)))
        assert second.messages[0]["content"] == "2"
        os.kill(keeper.pid, signal.SIGKILL)
        (second,) = play(processes, job(0, NEXT, (Turn(NEXT), first)))
        assert second.messages[0]["content"] == "2"


@pytest.mark.parametrize("number", [1024, pytest.param(4096, marks=pytest.mark.exhaustive)])
def test_many_long_openings_at_once(tmp_path, number):
    """Jobs and answers are more than all sockets hold, in one process, while the driver does something else. Would not
    catch a process that reads nothing for ever.
    """
    with EnvironmentProcesses(source(tmp_path, OPENS), 1, 100.0, opens=True) as processes:
        answers = play(processes, *(replace(each, turn=None) for each in turns(number, 4000)))
    assert all(answer.messages[0]["content"] == "x" * 4000 for answer in answers)


@pytest.mark.parametrize("number", [128, pytest.param(4096, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_one_of_many_that_hangs_costs_itself_alone(tmp_path, number, is_async):
    """Of episodes with rows and answers of 4 kB in one process; the limit ends it, and the others are played again.
    Would not catch two that hang in one instant.
    """
    module, how, wait = ("asyncio", "async ", "await ") if is_async else ("time", "", "")
    text = ONE_HANGS.format(module=module, how=how, wait=wait)
    limit = 2.0 if number == 128 else 20.0
    with EnvironmentProcesses(source(tmp_path, text), 1, limit) as processes:
        answers = play(processes, *turns(number, 4000))
    assert isinstance(answers[100], EpisodeFailure) and answers[100].cause == "timed_out"
    assert sum(isinstance(answer, Observation) for answer in answers) == number - 1


def test_keyword_arguments_are_those_of_the_constructor(tmp_path):
    """Refused before the run. Would not catch a wrong value."""
    with pytest.raises(ConfigError, match="kwargs must be arguments of Environment: .* 'strat'"):
        source(tmp_path, strat=1).host()
