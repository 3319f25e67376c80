"""Runs with episodes of several turns, as users start them: layouts, ahead of training, replay, resume, failures."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys

import pytest
from agents_for_tests import GRADE
from short_runs import LOCAL, MEGATRON, WITHOUT_RAY, metrics
from sweeps import WEEKLY, marks_of
from test_async_runs import ASYNC, SMALL, assert_same_bits, events, replicas, stopped_in, weights_equal

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

GRPO = "configs/grpo_cpu.yaml"
TURNS = "actor_rollout_ref.rollout.multi_turn"
FORGETS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{{ message.content[:1] }}{% else %}"
    "{{ message.content }}{% endif %}{% endfor %}"
)
"""A chat template that keeps one letter of what the policy said."""
DETERMINISTIC = "async_training.deterministic=true"
"""Which turns are drawn together, and so the last bits, do not depend on how long answers take."""
BOUND = 5e-5
"""Of single turns: the largest difference of log-probs between rollout and trainer in float32."""


def environment(name: str) -> tuple[str, ...]:
    return (
        *(f"{TURNS}.enable=true", f"{TURNS}.environment.path=tests/e2e/agents_for_tests.py"),
        *(f"{TURNS}.environment.name={name}", "custom_reward_function.path=null", "data.max_response_length=16"),
        *("custom_reward_function.name=null", f"{TURNS}.num_workers=2", "actor_rollout_ref.rollout.temperature=1.5"),
    )


def agent(*keys: str) -> tuple[str, ...]:
    return (*environment("Retry"), f"{TURNS}.environment.path=null", *(f"{TURNS}.agent.{key}" for key in keys))


FILE = "path=tests/e2e/agents_for_tests.py"


SHORT = (
    *("data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=4"),
    *("trainer.total_training_steps=2", "trainer.val_before_train=false", "trainer.test_freq=2"),
)


def differences(run) -> list[float]:
    name = "training/rollout_logprob_diff_max"
    return [line[name] for line in metrics(run).values() if name in line]


def test_an_agent_trains_and_its_tokens_are_exact(command_line) -> None:
    """In one process: several turns, an observation among them, the trainer's log-probs those of the engine. What was
    drawn, read and trained would differ there by whole units if a token were another.

    Would not catch an observation that is trained; tests of holes do.
    """
    run = command_line(*SHORT, *LOCAL, *environment("Retry"), config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 2 and all(line["num_turns/max"] >= 2 and line["num_turns/min"] == 1 for line in steps)
    assert all(line["episode/failed_ratio"] == 0 for line in steps)
    assert all(abs(line["critic/score/mean"] - line["environment/reward/mean"]) < 1e-6 for line in steps)
    assert 0 < max(differences(run)) < BOUND


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((2, "tensor_model_parallel_size=2"), marks=WEEKLY),
        pytest.param((2, "tensor_model_parallel_size=1", "pipeline_model_parallel_size=2"), marks=WEEKLY),
        pytest.param((2, "tensor_model_parallel_size=1", "context_parallel_size=2"), marks=pytest.mark.exhaustive),
        pytest.param(
            (4, "tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["TP2", "PP2", "CP2", "TP2PP2"],
)
def test_agents_in_layouts(command_line, layout) -> None:
    """Two steps each, environments in processes. Weights of the second step come from gradients of the first.
    Weekly are the axes that the sweeps have together.

    Would not catch a layout that loses a little: parity of gradients with holes is tested by itself.
    """
    ranks, *axes = layout
    keys = (WITHOUT_RAY, f"trainer.n_gpus_per_node={ranks}", *(f"{MEGATRON}.{axis}" for axis in axes))
    run = command_line(*SHORT, *keys, *environment("Retry"), config=GRPO)
    assert run.wait() == 0, run.text()
    assert 0 < max(differences(run)) < BOUND and run.left_over() == []


def test_a_run_of_agents_is_repeated_without_its_environment(command_line) -> None:
    """Ahead of training in one process, with a validation; the replay has an environment that may not run.

    Would not catch several replicas; the sweep below does.
    """
    keys = (
        *SMALL,
        "--local",
        "--collapse",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.rollout.max_num_seqs=48",
    )
    run = command_line(*keys, *environment("Retry"), config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*keys, *environment("Forbidden"), f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert len(events(run, "turn")) > 100 and events(again, "turn") == events(run, "turn")
    assert any(event["request"] < 0 for event in events(run, "turn"))
    assert_same_bits(again, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "turns"),
    [
        ("agent", "null"),
        ("environment", "2"),
        pytest.param("agent", "2", marks=pytest.mark.weekly),
        pytest.param("environment", "null", marks=pytest.mark.weekly),
    ],
)
def test_every_episode_that_is_cut_has_its_grade(command_line, kind: str, turns: str) -> None:
    """Ahead of training, agents that ask until nothing is left, and environments with `cut`, by tokens and by turns:
    each of more than 100 episodes has its grade and counts as truncated, in the run and in a replay without them.
    Would not catch what an environment returns in place of a number; test_environments.py does.
    """
    keys = (*SMALL, "--local", "--collapse", "trainer.total_training_steps=2", "trainer.test_freq=5040")
    limit = (f"{TURNS}.max_assistant_turns={turns}", "data.max_response_length=24")
    played = agent(FILE, "name=graded") if kind == "agent" else environment("Told")
    unplayed = agent(FILE, "name=forbidden") if kind == "agent" else environment("Forbidden")
    run = command_line(*keys, *played, *limit, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*keys, *unplayed, *limit, f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    for one in (run, again):
        ends = [event for event in events(one, "turn") if event["answer"].get("is_done")]
        grades = {GRADE} if turns == "2" else {GRADE, 2 * GRADE}
        assert len(ends) > 100 and {event["answer"]["reward"] for event in ends} <= grades
        assert all(event["turn"]["is_cut"] for event in ends)
        steps = [line for line in metrics(one).values() if "environment/reward/mean" in line]
        assert len(steps) == 2 and all(line["environment/reward/mean"] >= GRADE for line in steps)
        assert all(line["response_length/clip_ratio"] == 1 and line["episode/failed_ratio"] == 0 for line in steps)


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_truncated_stragglers_have_their_grade(command_line) -> None:
    """Two replicas ahead of training: each episode whose tokens so far were taken as the whole has its grade, in the
    run and in a replay with the same bits. Would not catch an agent that takes long to give it.
    """
    late = ("async_training.straggler_policy=truncate", "async_training.straggler_slices=1")
    keys = (*SMALL, "trainer.rollout_ahead=1", "trainer.total_training_steps=6", "trainer.test_freq=5040", *late)
    way = (*agent(FILE, "name=one_goes_on"), LONG, WITHOUT_RAY)
    run = command_line(*keys, *way, config=ASYNC)
    assert run.wait() == 0, run.text()
    again = command_line(*keys, *way, f"{TURNS}.agent.name=forbidden", f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    for one in (run, again):
        cut = {event["request"] for event in events(one, "decided") if event["kind"] == "truncate"}
        ends = {event["request"]: event for event in events(one, "turn") if event["answer"].get("is_done")}
        assert cut and all(ends[request]["answer"]["reward"] in (GRADE, 2 * GRADE) for request in cut)


@pytest.mark.exhaustive
def test_failed_episodes_are_drawn_again_and_repeated(command_line) -> None:
    """Ahead of training; one in four fails once, none is left that failed, and a replay has the same bits. Without a
    retry they have failed.

    Would not catch an episode that cannot begin, which is not drawn again.
    """
    keys = (*SMALL, "--local", "--collapse", "trainer.total_training_steps=2", "trainer.test_freq=5040")
    retry = f"{TURNS}.max_retries=1"
    run = command_line(*keys, retry, *environment("Flaky"), config=ASYNC)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "episode/drawn_again" in line]
    assert all(line["episode/drawn_again"] > 0 and line["episode/failed_ratio"] == 0 for line in steps) and steps
    again = command_line(*keys, retry, *environment("Forbidden"), f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    without = command_line(*keys, *environment("Flaky"), config=ASYNC)
    assert without.wait() == 0, without.text()
    assert any(line.get("episode/raised", 0) > 0 for line in metrics(without).values())


@pytest.mark.exhaustive
def test_a_lost_replica_and_late_answers_are_repeated(command_line) -> None:
    """Two replicas, two steps ahead with weights that change within episodes, answers that come late, a replica killed
    while it draws. All is trained once, and a replay without the environment has the same bits.

    Would not catch a death of the keeper, which ends the run.
    """
    keys = (*SMALL, "trainer.rollout_ahead=2", "async_training.partial_rollout=true", "trainer.total_training_steps=8")
    run = command_line(*keys, *environment("Late"), WITHOUT_RAY, config=ASYNC)
    run.wait_for(lambda: len(events(run, "taken")) >= 2, interval=0.01)
    known, lost = replicas(run), []
    run.wait_for(lambda: lost.extend(filter(None, [stopped_in(known, "rollout.advance")])) or lost, interval=0.001)
    lost[0].kill()
    assert run.wait() == 0, run.text()
    assert len(events(run, "lost")) == 1 and run.left_over() == []
    again = command_line(*keys, *environment("Forbidden"), WITHOUT_RAY, f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", [pytest.param("Retry", marks=WEEKLY), "Changes", pytest.param("three_tries", marks=WEEKLY)]
)
def test_a_killed_run_of_agents_goes_on(command_line, name) -> None:
    """Two steps ahead, deterministic, killed after a checkpoint that holds open episodes. With an environment that
    repeats, and with an agent that does: the bits of the run that was left alone. With one that does not: its open
    episodes have failed.

    Would not catch turns that had no answer yet: in rounds there are none when a checkpoint is written.
    """
    way = agent(FILE, f"name={name}") if name == "three_tries" else environment(name)
    settings = (
        *(*SMALL, "trainer.rollout_ahead=2", "async_training.deterministic=true", "trainer.total_training_steps=5"),
        *(WITHOUT_RAY, "trainer.save_freq=2", "trainer.test_freq=5040", "trainer.val_before_train=false"),
        *("async_training.partial_rollout=true", *way),
    )
    life = command_line(*settings, config=ASYNC)
    life.wait_for(lambda: len(events(life, "saved")) >= 1 and len(events(life, "taken")) >= 3, interval=0.01)
    life.kill_all()
    last = command_line(*settings, folder=life.folder, config=ASYNC)
    assert last.wait() == 0, last.text()
    assert "resuming after step" in last.text()
    steps = [line for line in metrics(last).values() if "episode/not_repeatable" in line]
    if name == "Changes":
        assert any(line["episode/not_repeatable"] > 0 for line in steps)
        return
    assert all(line["episode/failed_ratio"] == 0 for line in steps)
    whole = command_line(*settings, config=ASYNC)
    assert whole.wait() == 0, whole.text()
    assert weights_equal(last, whole)


@pytest.mark.exhaustive
def test_the_servers_of_a_gym_play_episodes(command_line, tmp_path) -> None:
    """A fake of NeMo Gym's three servers plays 64 episodes over responses and session paths, of several turns: the
    run's rewards are their verdicts, the trainer's log-probs the engine's, nothing is refused and no field unknown.

    Would not catch what Gym's own package does differently.
    """
    verdicts = tmp_path / "verdicts.jsonl"
    program = [sys.executable, "tests/agents/ecosystems/fake_gym.py", str(verdicts)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gym:
        url = gym.stdout.readline().strip()
        way = agent("path=tests/agents/ecosystems/fake_gym.py", f"kwargs={{url: '{url}'}}", "name=run")
        keys = ("trainer.total_training_steps=1", "trainer.test_freq=5040")
        way = (*way, "data.max_response_length=48", "actor_rollout_ref.rollout.temperature=1.0")  # room for three tries
        run = command_line(*SHORT, *keys, *LOCAL, *way, config=GRPO)
        assert run.wait() == 0, run.text()
        gym.stdin.close()
    seen = [json.loads(line) for line in verdicts.read_text().splitlines()]
    for each in seen:
        assert each["reward"] == (each["said"] == each["truth"]) * (1.25 - each["tries"] / 4)
    [step] = [line for line in metrics(run).values() if "environment/reward/mean" in line]
    seen = seen[:64]  # the validation of the last step follows
    assert len(seen) == 64 and {each["tries"] for each in seen} >= {1, 3}
    assert step["environment/reward/mean"] == pytest.approx(sum(each["reward"] for each in seen) / 64)
    assert step["num_turns/mean"] == pytest.approx(sum(each["tries"] for each in seen) / 64)
    assert step["episode/failed_ratio"] == 0 and not any(name.startswith("environment/agent_") for name in step)
    assert 0 < max(differences(run)) < BOUND


def test_an_agent_at_the_endpoint_is_an_environment(command_line) -> None:
    """The same three tries as an environment of the dataset's prompt, and as an agent with OpenAI's client, which
    begins its episodes: the same metrics to the last bit, so the same tokens.

    Would not catch a conversation that another model's template renders otherwise as a whole.
    """
    keys = (*SHORT, *LOCAL, "trainer.total_training_steps=1", "trainer.test_freq=5040", DETERMINISTIC)
    ways = environment("ThreeTries"), agent(FILE, "name=three_tries")
    runs = [command_line(*keys, *way, config=GRPO) for way in ways]
    for run in runs:
        assert run.wait() == 0, run.text()
    first, other = map(metrics, runs)
    assert any(line.get("num_turns/max", 0) == 3 for line in first.values())
    assert first == other


PADDED = "actor_rollout_ref.actor.use_remove_padding=false"
LONG = "data.max_response_length=48"
LAYOUTS = {
    "one": (1, "tensor_model_parallel_size=1"),
    "TP2": (2, "tensor_model_parallel_size=2"),
    "PP2": (2, "tensor_model_parallel_size=1", "pipeline_model_parallel_size=2"),
    "CP2": (2, "tensor_model_parallel_size=1", "context_parallel_size=2"),
}


@pytest.mark.parametrize(
    ("layout", "further"),
    [
        *(pytest.param(name, (), marks=marks_of(name, weekly=("one", "TP2", "PP2"))) for name in LAYOUTS),
        pytest.param("TP2", (PADDED,), marks=pytest.mark.exhaustive),
    ],
)
def test_conversations_of_one_episode_are_exact(command_line, tmp_path, layout, further) -> None:
    """An agent that asks in other conversations, and an environment with a template that writes earlier turns
    otherwise: the trainer's log-probs are the engine's, so each turn was learned behind what was before it. Contexts
    are three times as long as those of the bound; another token would differ by whole units. One process,
    PP2, and TP2 with packed rows, are weekly: CP2 has packed rows, and padded ones have TP2.

    Would not catch weights that change between two conversations; those of turns do so, too.
    """
    ranks, *axes = LAYOUTS[layout]
    keys = (WITHOUT_RAY, f"trainer.n_gpus_per_node={ranks}", *(f"{MEGATRON}.{axis}" for axis in axes), *further)
    shutil.copytree("assets/demo/model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").write_text(FORGETS)
    forgets = (f"actor_rollout_ref.model.path={tmp_path}/model", *environment("ThreeTries"))
    for way, most in ((agent(FILE, "name=asks_others"), 4), (forgets, 3)):
        run = command_line(*SHORT, *keys, *way, LONG, config=GRPO)
        assert run.wait() == 0, run.text()
        steps = [line for line in metrics(run).values() if "num_turns/min" in line]
        assert len(steps) == 2 and all(line["num_turns/max"] == most for line in steps)
        assert all(line["episode/failed_ratio"] == 0 for line in steps) and 0 < max(differences(run)) < 3 * BOUND
    assert "does not append" in run.text() and "a conversation of its own" in run.text()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["three_tries", pytest.param("hangs_up", marks=pytest.mark.weekly)])
def test_agents_in_split_pools_are_repeated(command_line, name: str) -> None:
    """Two replicas ahead of training with weights that change within episodes; agents in processes of the run, which
    may cancel requests. The replay has an agent that may not run, and the same bits.

    Would not catch an agent that is lost and starts again: its own tests do.
    """
    keys = (*SMALL, "trainer.rollout_ahead=2", "async_training.partial_rollout=true", "trainer.total_training_steps=4")
    run = command_line(*keys, *agent(FILE, f"name={name}"), WITHOUT_RAY, config=ASYNC)
    assert run.wait() == 0, run.text()
    assert len(events(run, "opened")) > 100 and run.left_over() == []
    steps = [line for line in metrics(run).values() if "num_turns/max" in line]
    assert max(line["num_turns/max"] for line in steps) == (3 if name == "three_tries" else 2)
    unread = [event["answer"].get("is_unread", False) for event in events(run, "turn")]
    cancelled = sum(line.get("environment/agent_cancelled/mean", 0) for line in steps)
    assert (sum(unread) > 50 and cancelled > 1) if name == "hangs_up" else not any(unread)
    again = command_line(*keys, *agent(FILE, "name=forbidden"), WITHOUT_RAY, f"--replay={run.run}", config=ASYNC)
    assert again.wait() == 0, again.text()
    assert_same_bits(again, run)
    begun, begun_again = (sorted(events(each, "opened"), key=str) for each in (run, again))
    assert begun == begun_again


@pytest.mark.exhaustive
def test_an_agent_may_be_a_program(command_line) -> None:
    """TP2 on two ranks, sixteen processes of an agent at a time; nothing of them is left.

    Would not catch hundreds of them, which need memory.
    """
    small = ("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.test_freq=5040")
    keys = (WITHOUT_RAY, "trainer.n_gpus_per_node=2", f"{MEGATRON}.tensor_model_parallel_size=2", *SHORT, *small)
    program = agent(f"command=[{sys.executable},tests/e2e/agents_for_tests.py]")
    run = command_line(*keys, *program, config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "episode/failed_ratio" in line]
    assert len(steps) == 2 and all(line["episode/failed_ratio"] == 0 for line in steps)
    assert any(line["environment/reward/mean"] > 0 for line in steps) and run.left_over() == []


def test_hostile_agents_cost_their_own_episodes(command_line) -> None:
    """Seven of eight episodes have one, of seven kinds at once, in the process of the run; the others train.

    Would not catch what an agent does to its own process: it is in one of several then.
    """
    keys = (*SHORT, *LOCAL, "trainer.test_freq=5040", f"{TURNS}.max_failed_ratio=0.99")
    run = command_line(*keys, *agent(FILE, "name=hostile"), config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "episode/raised" in line]
    assert len(steps) == 2 and all(line["episode/raised"] > 0 for line in steps)
    assert sum(line["episode/no_answer"] for line in steps) > 0 and "status 400" in run.text()
    assert all(line["episode/failed_ratio"] < 1 for line in steps)


@pytest.mark.exhaustive
def test_an_agent_that_fails_before_its_first_turn_costs_an_episode(command_line) -> None:
    """One prompt in eight raises before it has asked anything, in training and in validation; the others train.

    Would not catch a step in which none begins, which ends the run.
    """
    keys = (*SHORT, *LOCAL, "trainer.val_before_train=true", "trainer.total_training_steps=1")
    run = command_line(*keys, *agent(FILE, "name=fails_first"), config=GRPO)
    assert run.wait() == 0, run.text()
    (step,) = (line for line in metrics(run).values() if "episode/failed_ratio" in line)
    assert step["episode/raised"] > 0 and step["episode/failed_ratio"] == pytest.approx(step["episode/raised"] / 64)
    assert step["critic/score/mean"] == pytest.approx(step["environment/reward/mean"], abs=1e-6)
    assert "the agent raised ValueError: not this one" in run.text()


@pytest.mark.exhaustive
def test_failed_episodes_are_left_out_and_counted(command_line) -> None:
    """Two prompts in sixteen fail in every turn, one of them with its process, which others share. Scores are those of
    the others alone. More than the share that may fail ends the run with code 4 and the reason.

    Would not catch an episode that fails once in a while.
    """
    keys = (*SHORT, WITHOUT_RAY, "trainer.n_gpus_per_node=1", f"{MEGATRON}.tensor_model_parallel_size=1")
    run = command_line(*keys, *environment("Fails"), config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "episode/failed_ratio" in line]
    assert any(line["episode/raised"] > 0 for line in steps) and any(line["episode/crashed"] > 0 for line in steps)
    for line in steps:
        failed = sum(line[f"episode/{cause}"] for cause in ("raised", "timed_out", "crashed", "no_answer"))
        assert line["episode/not_repeatable"] == 0 and line["episode/failed_ratio"] == pytest.approx(failed / 64)
        assert line["critic/score/mean"] == pytest.approx(line["environment/reward/mean"], abs=1e-6)
    assert "episodes failed; the first: the environment" in run.text() and run.left_over() == []
    refused = command_line(*keys, *environment("Fails"), f"{TURNS}.max_failed_ratio=0.01", config=GRPO)
    assert refused.wait() == 4 and "max_failed_ratio" in refused.text(), refused.text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ((f"{TURNS}.environment.path=null",), "multi_turn.environment.path=null must be a Python file"),
        ((f"{TURNS}.environment.path=tests/e2e/agents_for_test.py",), "agents_for_tests.py"),
        ((f"{TURNS}.environment.name=Retries",), "must be a class of tests/e2e/agents_for_tests.py"),
        ((f"{TURNS}.max_assistant_turns=0",), "max_assistant_turns"),
        ((f"{TURNS}.tool_response_truncate_side=up",), "tool_response_truncate_side"),
    ],
)
def test_bad_keys_are_refused_by_plan(command_line, changes, sentence) -> None:
    """Before anything starts, with the nearest. Would not catch a class that cannot be made."""
    run = command_line(*environment("Retry"), *changes, config=GRPO, stage="plan", names_folder=False)
    assert run.wait() == 2 and sentence in " ".join(run.text().split()), run.text()
    assert "Traceback" not in run.text()


NUM_HELD_OUT = 40
"""Held-out prompts, which are asked at the end."""
COUNTING_RULE = """
def compute_group_scores(rows):
    compute_score("", "", "")
    lengths = [len(row["solution_str"]) for row in rows]
    return [sorted(lengths).index(length) / 4 for length in lengths]
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(__file__ + ".calls", "a") as calls:
        calls.write(f"{time.time()}\\n")
    return len(solution_str) / 10
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["turns", "slices", "groups"])
def test_a_rule_scores_while_others_are_drawn(command_line, tmp_path, kind) -> None:
    """Each answer once, some of them before the last one was drawn, and the same bits as a rule that comes last: with
    turns, also by a function of groups, and where launch_reward_fn_async asks for slices.

    Would not catch a rule that begins a little late; scripts/bench/sleeping_tools.py measures that.
    """
    rule = tmp_path / "counting.py"
    rule.write_text(COUNTING_RULE)
    keys = (
        f"custom_reward_function.path={rule}",
        "custom_reward_function.name=compute_score",
        "data.max_response_length=16",
    )
    own = {
        "turns": (*environment("Retry"), *keys, "async_training.slice_steps=2", DETERMINISTIC),
        "slices": (
            *keys,
            "actor_rollout_ref.rollout.temperature=1.5",
            "reward_model.launch_reward_fn_async=true",
            "async_training.slice_steps=1",
        ),
    }
    names = ("custom_reward_function.per_group=true", "custom_reward_function.name=compute_group_scores")
    own = (*own["turns"], *names) if kind == "groups" else own[kind]
    one = ("trainer.n_gpus_per_node=1", f"{MEGATRON}.tensor_model_parallel_size=1", WITHOUT_RAY)
    run = command_line(*SHORT, *one, *own, "trainer.test_freq=5040", config=GRPO)
    assert run.wait() == 0, run.text()
    calls = [float(line) for line in (tmp_path / "counting.py.calls").read_text().split()]
    assert len(calls) == 2 * 16 * (1 if kind == "groups" else 4) + NUM_HELD_OUT
    here = command_line(*SHORT, *LOCAL, *own, "trainer.test_freq=5040", config=GRPO)
    assert here.wait() == 0, here.text()
    assert metrics(run) == metrics(here)
    spans = [span for span in json.loads((run.run / "timeline.json").read_text()) if span["name"] in ("gen", "ref")]
    names = [
        name for _, name in sorted([(span["start"], span["name"]) for span in spans] + [(t, "call") for t in calls])
    ]
    assert "gen call gen" in " ".join(name for name, _ in itertools.groupby(names))
