"""Agents that speak OpenAI's protocol, with its own client: in functions and in processes, and what can go wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from agent_players import Player, agents_in, program, source, text

from megatron_rl.agents.agent_environment import AgentSource
from megatron_rl.agents.endpoint import EndpointLimits
from megatron_rl.agents.environment_source import EnvironmentProcesses, EnvironmentsHere
from megatron_rl.agents.observation import EpisodeFailure, InitialConversation, Observation, ToolCall
from megatron_rl.errors import ConfigError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return agents_in(tmp_path)


def test_a_conversation_is_an_episode(folder):
    """OpenAI's client, async and blocking, here and in processes: its requests are what the policy reads, its end is
    the episode's. Would not catch another client.
    """
    with ExitStack() as opened:
        processes = opened.enter_context(EnvironmentProcesses(source(folder, "guess"), 1, 60.0, opens=True))
        for environments in (processes, opened.enter_context(EnvironmentsHere(source(folder, "guess").host()))):
            player = Player(environments, turns=2)
            assert player.opening == InitialConversation(({"role": "system", "content": "guess"}, *text("?")))
            assert player.say("3") == Observation(text("no 0"))
            assert player.say("4") == Observation((), 0.5, is_done=True)
        here = opened.enter_context(EnvironmentsHere(source(folder, "blocking").host()))
        players = [Player(here, episode) for episode in range(40)]  # more than any pool of threads has
        assert all(player.opening == InitialConversation(text("now")) for player in players)
        assert [player.say("2").reward for player in players] == [2.0] * 40


def test_calls_are_streamed_and_come_back(folder):
    """Two calls at once with their results, by OpenAI's client, in the form that chat templates read. Would not catch
    a client that joins parts of arguments wrongly: they come in one.
    """
    with EnvironmentsHere(source(folder, "streams").host()) as here:
        player = Player(here)
        assert isinstance(player.opening, InitialConversation) and player.opening.tools[0]["function"]["name"] == "add"
        answer = player.say("", ToolCall("add", {"a": 1}), ToolCall("add", {"a": 3}))
        assert isinstance(answer, Observation) and [message["role"] for message in answer.messages] == ["tool"] * 2
        assert answer.messages[1]["content"] == "7" and player.say("done").is_done


@pytest.mark.parametrize(
    ("name", "turns", "cause", "reason"),
    [
        ("raises", 0, "raised", "ValueError: no more"),
        ("cancels", 0, "raised", "the agent raised CancelledError"),
        ("stays", 0, "timed_out", "multi_turn.tool_timeout_s=1"),
        ("behind", 0, "raised", "ValueError: no more"),
        ("asks_nothing", 0, "no_answer", "without a request"),
        ("sleeps", 0, "timed_out", "multi_turn.tool_timeout_s=1"),
        ("another_reward", 1, "no_answer", "must return a finite number or None, not 'good'"),
    ],
)
def test_what_an_agent_does_wrong_costs_its_episode(folder, name, turns, cause, reason):
    """Would not catch an agent that holds the interpreter's lock: the keeper ends its process."""
    with EnvironmentsHere(source(folder, name, timeout_s=1.0).host()) as here:
        player = Player(here)
        answer = [player.opening, *(player.say("1") for _ in range(turns))][-1]
    assert isinstance(answer, EpisodeFailure) and answer.cause == cause and reason in answer.reason


@pytest.mark.parametrize(
    ("name", "turns", "said", "answer"),
    [
        ("graded", 3, "1", Observation((), 3.1, True)),
        ("graded", 2, "", Observation((), 2.0, True)),
        ("gives_up", 2, "", Observation((), 0.0, True, {"agent_ungraded": 1.0})),
        ("gives_up", 1, "1", Observation((), 0.5, True, {"agent_ungraded": 1.0})),
        ("own_fault", 1, "1", "raised"),
    ],
)
def test_an_agent_is_told_that_its_episode_is_over(folder, name, turns, said, answer):
    """By OpenAI's client: the turn that was cut ends by length, further requests are too long, and the end has the
    grade, also of an agent in another process that plays the turns before again. One that its refused requests end has
    no grade, one that ends by its own fault has failed. Would not catch a command; a run has one.
    """
    with ExitStack() as opened:
        processes = opened.enter_context(EnvironmentProcesses(source(folder, name), 1, 60.0, opens=True))
        for environments in (processes, opened.enter_context(EnvironmentsHere(source(folder, name).host()))):
            player = Player(environments, turns=turns)
            for _ in range(turns - bool(said)):
                assert not player.say("1").is_done
            environments.forget(player.episode if turns > 2 else -1)
            got = player.cut(said)
            assert got == answer or isinstance(got, EpisodeFailure) and got.cause == answer, got


def test_requests_that_cannot_be_answered_are_refused_and_counted(folder):
    """Several answers, stops, other formats, another key, a reward that is none: each has its status. Would not catch
    fields that OpenAI adds.
    """
    with EnvironmentsHere(source(folder, "is_refused").host()) as here:
        answer = Player(here).say("1")
    assert answer == Observation((), 2.25, is_done=True, counts={"agent_refused": 4.0, "agent_unauthorized": 1.0})


def test_other_conversations_begin_anew(folder):
    """Two at once, which wait for each other, and one that goes on with the first but has other tools. Would not catch
    more than a queue of them.
    """
    with EnvironmentsHere(source(folder, "branches").host()) as here:
        player = Player(here)
        begun = [player.say("1"), player.say("2"), player.say("3")]
        assert player.say("4").is_done
    assert all(isinstance(answer, Observation) and answer.messages == () for answer in begun)
    assert {answer.anew.messages[0]["content"] for answer in begun[:2]} == {"a", "b"}
    assert [message["content"] for message in begun[2].anew.messages] == ["one", "1", "more"]
    assert begun[2].anew.tools[0]["function"]["name"] == "add"


def test_a_client_that_asks_again_gets_the_same_answer(folder):
    """It gave up after half a second and has sent its request again. Would not catch a client that does not say so."""
    with EnvironmentProcesses(source(folder, "retries"), 1, 60.0, opens=True) as processes:
        player = Player(processes)
        time.sleep(1.5)
        answer = player.say("late")
    assert answer == Observation((), 0.0, is_done=True)


def test_a_cancelled_request_has_no_reader(folder):
    """OpenAI's client hangs up while the policy samples: that turn is unread, and the next request begins another
    conversation. One that reads nothing says so at its end. Here, too, where nothing looks at clients meanwhile.
    Would not catch a client that hangs up while it reads.
    """
    with EnvironmentsHere(source(folder, "hangs_up_in_a_thread").host()) as here:
        player = Player(here)
        time.sleep(1.5)
        assert player.say("lost").is_unread and player.say("2") == Observation((), 2.0, True)
    with EnvironmentProcesses(source(folder, "hangs_up"), 1, 60.0, opens=True) as processes:
        player = Player(processes)
        time.sleep(1.5)
        unread = player.say("lost")
        assert unread.is_unread and unread.anew == InitialConversation(text("second"))
        assert unread.counts == {"agent_cancelled": 1.0} and player.say("2") == Observation((), 2.0, True)
    with EnvironmentProcesses(source(folder, "reads_nothing"), 1, 60.0, opens=True) as processes:
        player = Player(processes)
        time.sleep(1.5)
        assert player.cut("lost") == Observation((), 1.0, True, {"agent_cancelled": 1.0}, is_unread=True)


def test_the_servers_of_a_gym_play_episodes(tmp_path):
    """A fake of NeMo Gym's three servers, over responses and session paths: its verdicts are the rewards, its tries one
    conversation, and nothing is refused. Would not catch a run; test_agent_runs.py has one of 64 episodes.
    """
    gym, verdicts = Path(__file__).parent / "ecosystems/fake_gym.py", tmp_path / "verdicts.jsonl"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, gym, verdicts], **pipes) as servers:
        given = {"url": servers.stdout.readline().strip()}
        of = AgentSource(str(gym), "run", "agent.path", (), 30.0, EndpointLimits(1000), given)
        with EnvironmentProcesses(of, 1, 60.0, opens=True) as processes:
            for number, (says, reward) in enumerate(((["7"], 1.0), (["1", "7"], 0.75), (["1", "2", "3"], 0.0))):
                player = Player(processes, number, prompt=[*text("3+4=")], ground_truth="7")
                assert player.opening == InitialConversation(text("3+4="))
                *before, last = (player.say(said) for said in says)
                assert before == [Observation(text("no="))] * len(before) and last == Observation((), reward, True)
        servers.stdin.close()
    assert [json.loads(line)["reward"] for line in verdicts.read_text().splitlines()] == [1.0, 0.75, 0.0]
    with pytest.raises(ConfigError, match="must be callable as run\\(task, endpoint, uri=...\\)"):
        replace(of, kwargs={"uri": "x"}).host()


@pytest.mark.parametrize("of", [source, program])
def test_more_agents_than_may_be_open(folder, of):
    """Functions and programs: the third of two has failed and is not started, and once one has ended another one may
    begin; what was not opened is counted. Would not catch a limit over several processes: each has its own.
    """
    given = (folder, "blocking") if of is source else (folder,)
    limited = replace(of(*given), limits=EndpointLimits(1 << 16, max_open=2))
    with EnvironmentsHere(limited.host()) as here:
        first, second, third = (Player(here, episode, way="well") for episode in range(3))
        assert isinstance(second.opening, InitialConversation) and isinstance(third.opening, EpisodeFailure)
        assert "multi_turn.agent.max_open=2" in third.opening.reason and third.opening.cause == "no_answer"
        assert first.say("3") == Observation((), 3.0, True, {"agent_closed": 1.0})
        assert isinstance(Player(here, 4, way="well").opening, InitialConversation)


def test_an_agent_may_be_a_process(folder):
    """Its task comes as JSON, its reward by POST; one that fails is quoted, one that hangs is killed with its child.

    Would not catch a process that leaves its session.
    """
    with EnvironmentProcesses(program(folder), 1, 60.0, opens=True) as processes:
        player = Player(processes, 1, way="well")
        assert player.opening == InitialConversation(text("well")) and player.say("3") == Observation(
            (), 3.0, is_done=True
        )
        failed = Player(processes, 2, way="fails").opening
        assert isinstance(failed, EpisodeFailure) and "exited with code 3; it said: about to fail" in failed.reason
    with EnvironmentsHere(program(folder, timeout_s=3.0).host()) as here:
        hung = Player(here, 3, way="hangs").opening
        assert isinstance(hung, EpisodeFailure) and hung.cause == "timed_out"
        left = [child for child in psutil.Process().children(recursive=True) if "sleep" in child.name()]
        assert all(child.status() == psutil.STATUS_ZOMBIE for child in left)


def test_a_lost_agent_is_started_again_and_must_ask_as_before(folder):
    """A fresh host with a recorded turn plays it to a new agent. Would not catch one that asks the same by chance."""
    with EnvironmentsHere(source(folder, "guess").host()) as here:
        first = Player(here, turns=3)
        first.say("3")
    with EnvironmentsHere(source(folder, "guess").host()) as here:
        again = Player.__new__(Player)
        vars(again).update(vars(first), environments=here)
        assert again.say("4") == Observation(text("no 1"))
    with EnvironmentsHere(source(folder, "blocking").host()) as here:
        vars(again).update(vars(first), environments=here)
        answer = again.say("4")
    assert isinstance(answer, EpisodeFailure) and answer.cause == "not_repeatable" and "began with" in answer.reason
