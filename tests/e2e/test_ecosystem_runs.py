"""Runs with other packages' environments and with real clients, each package in an environment of its own."""

from __future__ import annotations

import functools
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest
from byte_models import speaker, taught_model
from command_line import REPOSITORY, CommandLine
from make_agent_assets import rows as guess_rows
from make_demo_assets import write_parquet
from served import served
from short_runs import LOCAL, WITHOUT_RAY, metrics, reached
from test_agent_runs import BOUND, GRPO, LONG, SHORT, TURNS, agent, differences, environment
from test_async_runs import ASYNC, SMALL, assert_same_bits, events
from typed_commands import rows_of_agents

pytestmark = [pytest.mark.dist, pytest.mark.weekly, pytest.mark.exhaustive, pytest.mark.timeout(1800)]

OF_PACKAGES = REPOSITORY / "tests/agents/ecosystems"
FEW = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2")
TEN = (*SMALL, *FEW, "--local", "--collapse", "trainer.total_training_steps=10", "trainer.test_freq=5040")
ROOM = (
    "actor_rollout_ref.rollout.temperature=1.0",
    "data.max_prompt_length=1400",
    "data.max_response_length=600",
    "trainer.val_before_train=false",
)
ENGINE = ("actor_rollout_ref.rollout.max_num_batched_tokens=8192", "actor_rollout_ref.rollout.max_num_seqs=16")


@dataclass(frozen=True)
class Played:
    """An adapter and what it plays. source: of its rows; says: what the policy has been taught to say; turns: of it
    in the longest episode, at least.
    """

    packages: str
    adapter: str
    source: str
    kwargs: dict
    says: tuple[str, ...]
    turns: int

    def way(self) -> tuple[str, ...]:
        """Keys of a run that plays it."""
        kwargs = f"kwargs={json.dumps(self.kwargs)}"
        if self.adapter == "verifiers":
            return *agent("path=adapter:verifiers", kwargs, "name=run"), f"{TURNS}.format=pythonic"
        own = (f"path=adapter:{self.adapter}", "name=Environment", kwargs)
        return *environment("Environment"), *(f"{TURNS}.environment.{key}" for key in own)


@pytest.fixture(scope="module")
def speaks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], str]:
    """The key of a model that says these texts; each is taught once."""

    @functools.cache
    def key(says: tuple[str, ...]) -> str:
        return f"actor_rollout_ref.model.path={speaker(tmp_path_factory.mktemp('speakers') / 'one', says)}"

    return key


def in_brackets(first: int, end: int) -> tuple[str, ...]:
    return tuple(f"[{number}]" for number in range(first, end))


BLACKJACK = {"id": "Blackjack-v1", "actions": ["stick", "hit"]}
NUMBER, TIC_TAC_TOE = {"id": "GuessTheNumber-v0-raw"}, {"id": "TicTacToe-v0-raw", "players": 2}
GUESSES, ADDED = ({"env": {"taskset": {"id": f"{name}-v1"}}} for name in ("guesses", "added"))
CALL = '[adder_add(terms="7+3")]'


def questions(file: Path) -> str:
    """Guessing games, as rows of a file of the user's own."""
    rows = ({"prompt": "0-15?", "answer": str(number % 16)} for number in range(64))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def made_rows(python: str, source: str, file: Path, *settings: str, seed: int = 0, size: int = 160) -> Path:
    """Rows of an adapter's tasks, as a user makes them."""
    command = [sys.executable, "-m", "megatron_rl", "dataset", "--from", source, "--python", python]
    command += [f"--out={file}", f"--size={size}", f"--seed={seed}", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return file


def files(rows: Path) -> tuple[str, ...]:
    return f"data.train_files={rows}", f"data.val_files={rows}"


def test_real_clients_drive_a_run(command_line, interpreter) -> None:
    """Four clients over three protocols, with streams and limits: what they read is what is trained. Would not catch
    calls, which test_real_packages.py plays, nor cancelled requests, of which test_agent_runs.py has some.
    """
    way = agent(f"path={OF_PACKAGES}/real_clients.py", "kwargs={trains: true}", "name=run")
    python = f"{TURNS}.python={interpreter('openai anthropic openai-agents')}"
    keys = (*SHORT, WITHOUT_RAY, "trainer.n_gpus_per_node=1", "trainer.test_freq=5040", "actor_rollout_ref.rollout.n=2")
    one = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1"
    run = command_line(*keys, one, *way, python, LONG, "actor_rollout_ref.rollout.temperature=1.0", config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 2 and all(line["episode/failed_ratio"] == 0 for line in steps)
    assert all(line["num_turns/max"] == 2 for line in steps)
    assert not any("environment/agent_refused/mean" in line for line in steps)
    assert 0 < max(differences(run)) < 3 * BOUND and run.left_over() == []


RIGHT_SUMS = "val-core/reasoning_gym:chain_sum/reward/mean@1"
HELD_OUT = "val-core/demo/guess/reward/mean@1"
NUMBERS = tuple(str(number) for number in range(16))
PLAYED = {
    "reasoning-gym": Played("reasoning-gym", "reasoning_gym", "reasoning_gym:gcd", {"tag": "answer"}, ("1", "2"), 1),
    "gymnasium": Played("gymnasium", "gymnasium", f"gymnasium:{BLACKJACK['id']}", BLACKJACK, ("stick", "hit", "x"), 4),
    "textarena": Played("textarena", "textarena", f"textarena:{NUMBER['id']}", NUMBER, in_brackets(1, 21), 4),
    "textarena, two players": Played(
        "textarena", "textarena", f"textarena:{TIC_TAC_TOE['id']}", TIC_TAC_TOE, in_brackets(0, 9), 3
    ),
    "tinker-cookbook": Played(
        "tinker-cookbook torch==2.13.0", "tinker_cookbook", "", {"file": f"{OF_PACKAGES}/tinker_guess.py"}, NUMBERS, 4
    ),
    "verifiers, turns": Played("verifiers==0.4.0", "verifiers", "verifiers:guesses-v1", GUESSES, NUMBERS, 4),
    "verifiers, tools": Played("verifiers==0.4.0", "verifiers", "verifiers:added-v1", ADDED, (CALL, "10", "11"), 2),
}


@pytest.mark.parametrize("played", PLAYED.values(), ids=PLAYED)
def test_ten_steps_are_repeated_without_the_package(
    command_line, interpreter, speaks, tmp_path, monkeypatch, played: Played
) -> None:
    """No episode fails, some have all their turns and not all the same reward, and a replay has the same bits with an
    interpreter that does not exist. Would not catch rewards that are wrong; test_real_packages.py has them by hand.
    """
    monkeypatch.setenv("PYTHONPATH", str(OF_PACKAGES))
    python = interpreter(played.packages)
    rows = made_rows(python, played.source or questions(tmp_path / "questions.jsonl"), tmp_path / "rows.parquet")
    keys = (*TEN, *ENGINE, speaks(played.says), *played.way(), *ROOM, *files(rows))
    run = command_line(*keys, f"{TURNS}.python={python}", config=ASYNC)
    assert run.wait(900) == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 10 and all(line["episode/failed_ratio"] == 0 for line in steps)
    assert max(line["num_turns/max"] for line in steps) >= played.turns
    assert min(line["critic/score/min"] for line in steps) < max(line["critic/score/max"] for line in steps)
    again = command_line(*keys, f"{TURNS}.python=/nowhere/python", f"--replay={run.run}", config=ASYNC)
    assert again.wait(900) == 0, again.text()
    assert_same_bits(again, run)
    assert events(again, "turn") == events(run, "turn")


TOOLS = ("custom_reward_function.path=scripts/demo_tools.py", "custom_reward_function.name=compute_score")
ASKS = """task=$(cat)
said=$(curl -sf URL/chat/completions KEY -d '{"messages": [{"role": "user", "content": "0-15?"}]}')
[[ $task == *0-15* && $said == *'"7"'* ]] && reward=1.0 || reward=0.5
curl -sf URL/reward KEY -d '{"reward": '$reward'}'
"""
KEY = '-H "Authorization: Bearer $OPENAI_API_KEY"'
SCRIPTS = {
    "agent.sh": ASKS.replace("URL", "$OPENAI_BASE_URL").replace("KEY", KEY, 2),
    "harness.sh": ASKS.replace("URL", "$POLICY_SESSION_URL").replace("KEY", ""),
}
HARBOR = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Make hello.txt.\n",
    "environment/Dockerfile": "FROM python:3.12\nWORKDIR /app\n",
    "tests/test.sh": "test -f /app/hello.txt; echo $((2 - $?)) > /logs/verifier/reward.txt\n",
}
WRITES = ("```bash\ntouch hello.txt\n```", "done")
HERE = [row for row in rows_of_agents() if "python=" not in row[-1] and "fake_gym" not in row[-1]]
"""Rows of the page that need no other interpreter; test_agent_runs.py has the servers of NeMo Gym."""


@pytest.mark.parametrize("row", HERE, ids=lambda row: row[0])
def test_each_row_of_the_page_is_a_run(command_line, speaks, tmp_path, row: list[str]) -> None:
    """With the keys that it names: no episode fails, and the longest has several turns where its environment goes on.
    Would not catch a row that teaches nothing; make demo-agent has two of them.
    """
    keys = row[-1].split("`")[1]
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(script)
        keys = keys.replace(f",{name}", f",{tmp_path / name}")
    for number, (name, text) in itertools.product(range(8), HARBOR.items()):
        file = tmp_path / f"tasks/{number}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    is_tool, is_harbor = "tool_path" in keys, "harbor" in keys
    says = ('[add(terms="7+3")]', "00010") if is_tool else WRITES if is_harbor else NUMBERS
    source = f"harbor:{tmp_path}/tasks" if is_harbor else questions(tmp_path / "questions.jsonl")
    rows = made_rows(sys.executable, source, tmp_path / "rows.parquet")
    way = [*environment("Environment"), f"{TURNS}.environment.path=null", f"{TURNS}.format=pythonic"]
    way += [*(f"{TURNS}.{key}" for key in keys.split()), *(TOOLS if is_tool else ())]
    run = command_line(*SHORT, *LOCAL, *ENGINE, speaks(says), *way, *ROOM, *files(rows), *FEW, TEN[-1], config=GRPO)
    assert run.wait() == 0, run.text()
    steps = [line for line in metrics(run).values() if "num_turns/mean" in line]
    assert len(steps) == 2 and all(line["episode/failed_ratio"] == 0 for line in steps)
    assert max(line["num_turns/max"] for line in steps) >= (1 if ".sh" in keys else 2)
    assert max(line["critic/score/max"] for line in steps) > 0 or is_tool
    assert any(line.get("environment/tool_calls/mean", 0) > 0 for line in steps) == is_tool


def test_each_adapter_of_the_page_is_played() -> None:
    """By a run with its package."""
    assert {row[-1].split("adapter:")[1].strip("`") for row in rows_of_agents() if "python=" in row[-1]} == {
        *(played.adapter for played in PLAYED.values()),
        "openenv",
    }


@contextmanager
def standing(run: CommandLine, step: int) -> Iterator[None]:
    """The run stands still while the block runs, from a step on."""
    run.wait_for(reached(run, step), interval=0.01)
    process = psutil.Process(run.process.pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


@pytest.mark.parametrize("names", [("first", "second"), ("first",)], ids=["one of two", "the only one"])
def test_episodes_of_a_server_that_is_killed_have_failed(command_line, interpreter, speaks, tmp_path, names) -> None:
    """Killed when step 5 ends, and another is in its place when step 7 does: only its episodes have failed, only
    between them, and scores are of those that were played. Would not catch a server that hangs, which has its time-out.
    """
    python, file = interpreter("openenv-core"), tmp_path / "rows.parquet"
    tasks = guess_rows("guess", "train", 64, 0)
    for number, row in enumerate(tasks):
        row["extra_info"]["server"] = names[number % len(names)]
    write_parquet(tasks, file)
    with ExitStack() as servers:
        served_by = {name: servers.enter_context(served(python)) for name in names}
        urls = {name: url for name, (url, _) in served_by.items()}
        way = Played("", "openenv", "", {"urls": urls, "observation": "text"}, (), 0).way()
        keys = (f"{TURNS}.max_failed_ratio=1", f"{TURNS}.python={python}", speaks(NUMBERS))
        run = command_line(*TEN, *ENGINE, *way, *ROOM, *files(file), *keys, config=ASYNC)
        url, server = served_by["first"]
        with standing(run, 5):
            server.kill()
            server.wait()
        with standing(run, 7):
            servers.enter_context(served(python, url))
        assert run.wait() == 0, run.text()
    steps = {step: line for step, line in metrics(run).items() if "episode/failed_ratio" in line}
    failed = {step: line["episode/failed_ratio"] for step, line in steps.items()}
    assert sorted(failed) == [*range(1, 11)] and not any(failed[step] for step in (1, 2, 3, 4, 5, 10)), failed
    assert failed[7] == 1 if len(names) == 1 else 0 < failed[7] < 1, failed
    for line in steps.values():
        assert line["episode/raised"] == pytest.approx(16 * line["episode/failed_ratio"])
        assert line.get("critic/score/mean") == pytest.approx(line.get("environment/reward/mean"), abs=1e-6)
        assert ("critic/score/mean" in line) == (line["episode/failed_ratio"] < 1)
    assert "cannot be reached" in run.text() or "the server has gone" in run.text()


@pytest.mark.timeout(3300)
def test_guessing_on_a_server_is_learnt(command_line, interpreter, tmp_path) -> None:
    """As `make demo-agent` does without one, in as many steps; numbers are those of the server's seeds. Would not
    catch what a further seed shows.
    """
    python, folder = interpreter("openenv-core"), tmp_path / "guess"
    made = subprocess.run([sys.executable, "scripts/make_agent_assets.py", "guess", f"--output={folder}"])
    assert made.returncode == 0
    model, data = f"actor_rollout_ref.model.path={folder}/model", (f"data.train_files={folder}/train.parquet",)
    with served(python) as (url, _):
        kwargs = f"{TURNS}.environment.kwargs={{url: '{url}', observation: text}}"
        way = (f"{TURNS}.environment.path=adapter:openenv", f"{TURNS}.environment.name=Environment", kwargs)
        keys = (*LOCAL, model, *data, f"data.val_files={folder}/test.parquet", *way, f"{TURNS}.python={python}")
        run = command_line(*keys, config="configs/agents/guess.yaml")
        assert run.wait(3000) == 0, run.text()
    held_out = [line[HELD_OUT] for line in metrics(run).values() if HELD_OUT in line]
    assert held_out[0] < 0.5 and held_out[-1] >= 0.95, held_out


SUMS = tuple(f"{end}_{part}={number}" for part, number in (("terms", 2), ("digits", 1)) for end in ("min", "max"))
RIGHT, ANSWERS, BATCH, STEPS = 0.6, range(-9, 19), 128, 1000
TREE = "actor_rollout_ref.model.enable_tree_training=true"
OPTIMIZER = "actor_rollout_ref.actor.optim."
TAUGHT = tuple(OPTIMIZER + key for key in ("lr=3e-3", "lr_warmup_steps=20", "clip_grad=1", "betas=[0.9,0.95]"))


def lessons_of(rows: Path, number: int, seed: int) -> list[list[dict[str, str]]]:
    """Transcripts of a teacher who knows the answer in three of five rows, and else draws any."""
    draw, tasks = random.Random(seed), pyarrow.parquet.read_table(rows).to_pylist()
    lessons = []
    for task in draw.choices(tasks, k=number):
        truth = task["reward_model"]["ground_truth"]
        response = truth if draw.random() < RIGHT else str(draw.choice(ANSWERS))
        lessons.append([*task["prompt"], {"role": "assistant", "content": response}])
    return lessons


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sums_of_reasoning_gym_are_learnt(command_line, interpreter, tmp_path, seed: int) -> None:
    """By a model of a noisy teacher, and sampled. Would not catch a model that only knows the 200 sums of two digits,
    which are all there are.
    """
    python = interpreter("reasoning-gym")
    train = made_rows(python, "reasoning_gym:chain_sum", tmp_path / "train.parquet", *SUMS, seed=seed, size=4096)
    test = made_rows(python, "reasoning_gym:chain_sum", tmp_path / "test.parquet", *SUMS, seed=seed + 99, size=256)
    keys = (f"data.train_batch_size={BATCH}", f"trainer.total_training_steps={STEPS}", f"trainer.seed={seed}", TREE)
    lessons = lessons_of(train, BATCH * STEPS, seed)
    model = taught_model(tmp_path / "taught", lessons, *keys, *TAUGHT, "data.max_length=96", seed=seed)
    way = ("path=adapter:reasoning_gym", "name=Environment", "kwargs={tag: answer}")
    keys = (*(f"{TURNS}.environment.{key}" for key in way), f"{TURNS}.python={python}", f"trainer.seed={seed}")
    keys = (*keys, "data.max_prompt_length=80", "data.max_response_length=4", "trainer.total_training_steps=80")
    files = (f"data.train_files={train}", f"data.val_files={test}", f"actor_rollout_ref.model.path={model}")
    run = command_line(*LOCAL, *keys, *files, config="configs/agents/guess.yaml")
    assert run.wait(1200) == 0, run.text()
    held_out = [line[RIGHT_SUMS] for line in metrics(run).values() if RIGHT_SUMS in line]
    assert held_out[0] < 0.65 and held_out[-1] >= 0.9, held_out
