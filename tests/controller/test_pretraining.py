"""Examples of the pretraining loss: read, visited in an order that resumes, refused under the keys that are meant."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_rl.checkpoint.model_folder import ModelFolder
from megatron_rl.config.load import read_config
from megatron_rl.config.roles import Placement
from megatron_rl.config.schema import RunConfig
from megatron_rl.config.task_config import for_task
from megatron_rl.config.validate import value_problems
from megatron_rl.controller.pretraining import Pretraining
from megatron_rl.errors import ConfigError
from megatron_rl.planning.hardware import load_hardware
from megatron_rl.planning.layout_sizes import Layout
from megatron_rl.planning.pretraining_rules import pretraining_problems
from megatron_rl.planning.role_ledger import SCORE, UPDATE, passes_of
from megatron_rl.planning.step_load import Load
from megatron_rl.planning.step_time import updated_load
from megatron_rl.planning.time import Estimator, ModelCost

REPOSITORY = Path(__file__).parents[2]
DEMO = REPOSITORY / "configs" / "demo_cpu.yaml"


def config(*overrides: str) -> RunConfig:
    return read_config(DEMO, list(overrides))[0]


@pytest.fixture(scope="module")
def folder():
    return ModelFolder(REPOSITORY / "assets/demo/model")


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def texts(folder: Path, count: int = 5) -> Path:
    return write(folder / "texts.jsonl", [{"text": f"{number}+{number}={2 * number}"} for number in range(count)])


def rows_of(mix: Pretraining) -> list[list[int]]:
    return [row.tolist() for row in mix.next().record["input_ids"].unbind()]


def test_order_goes_on(tmp_path: Path, folder) -> None:
    """Two of five examples at a time, over two epochs; a second one that takes the state over gives the same. Would not
    catch a state that is saved at another moment."""
    run = config("ptx.coef=1", f"ptx.files={texts(tmp_path)}", "ptx.mini_batch_size=2")
    whole, resumed = Pretraining(run, folder), Pretraining(run, folder)
    first = [rows_of(whole) for _ in range(3)]
    assert len({str(row) for batch in first for row in batch}) == 5 and all(len(batch) == 2 for batch in first)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [rows_of(resumed) for _ in range(4)] == [rows_of(whole) for _ in range(4)]
    fresh = Pretraining(run, folder)
    fresh.load_state_dict({"cursor": {}})  # of a run without examples
    assert rows_of(fresh) == first[0]
    assert whole.notes[0].startswith("pretraining: ") and "texts.jsonl" in whole.notes[0]


def test_there_are_none_unless_asked_for(folder) -> None:
    """Would not catch a role that waits for some."""
    none = Pretraining(config(), folder)
    assert none.next() is None and none.state_dict() == {} and none.notes == []
    assert Placement.of(config()).leader.mixed is None
    assert Placement.of(for_task(config("ptx.coef=1", "ptx.files=a"), "sft")).leader.mixed is None


def test_conversations_count_the_answers(tmp_path: Path, folder) -> None:
    """As in sft: of a prompt and its answer the answer alone, with the end token. Would not catch other masks, which
    tests/data have."""
    file = write(tmp_path / "answers.jsonl", [{"prompt": "1+1=", "response": "2"}])
    record = Pretraining(config("ptx.coef=1", f"ptx.files={file}", "ptx.mini_batch_size=1"), folder).next().record
    (mask,), (row,) = record["sampled"].unbind(), record["input_ids"].unbind()
    assert mask.tolist() == [False] * (len(row) - 2) + [True, True] and folder.tokenizer.decode(row[-2:-1]) == "2"


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        ([{"text": "1" * 99}], (), "must have at most ptx.max_length tokens: raise ptx.max_length, or set ptx.trunc"),
        ([{"text": None}, {"text": "1"}], (), "set ptx.bad_rows=skip"),
        ([{"word": "1"}], (), "ptx.text_key"),
        ([{"text": "1"}], ("ptx.text_key=txt",), "has no column 'txt' (ptx.text_key)"),
    ],
)
def test_bad_files_name_the_keys_that_are_meant(tmp_path: Path, folder, rows, overrides, said) -> None:
    """Would not catch other sentences of the readers, whose keys have the same names."""
    file = write(tmp_path / "bad.jsonl", rows)
    run = config("ptx.coef=1", f"ptx.files={file}", "ptx.max_length=20", *overrides)
    with pytest.raises(ConfigError) as refused:
        Pretraining(run, folder)
    assert said in str(refused.value) and "data." not in str(refused.value)


def test_other_examples_are_no_continuation(tmp_path: Path, folder) -> None:
    """Would not catch examples that differ in nothing but their file's folder, which may be another."""
    run = config("ptx.coef=1", f"ptx.files={texts(tmp_path)}", "ptx.mini_batch_size=2")
    saved = Pretraining(run, folder).state_dict()
    texts(tmp_path, 6)
    with pytest.raises(ConfigError, match=r"of texts.jsonl is 6 now and was 5 when it was saved"):
        Pretraining(run, folder).load_state_dict(saved)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("ptx.files=a.jsonl",), "ptx.files=a.jsonl is of no use with ptx.coef=0: nothing is learned from these files"),
        (("ptx.coef=1",), "ptx.files=null must be a path or a list of at least one path, as ptx.coef=1; try: ptx"),
        (("ptx.coef=1", "ptx.files=[]"), "ptx.files=[] must be a path or a list of at least one path"),
        (("ptx.coef=1", "ptx.files=nowhere.jsonl"), "ptx.files=nowhere.jsonl must be a .parquet or .jsonl file"),
        (
            (
                *("ptx.coef=1", "ptx.files=FILE", "ptx.max_length=512", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=100",
            ),
            "actor.ppo_max_token_len_per_gpu=100 must be >= ptx.max_length(512); try: 512",
        ),
    ],
)
def test_keys_that_cannot_be(tmp_path: Path, overrides, said) -> None:
    """Each alone. Would not catch a rule that only preflight as a whole could break."""
    given = [one.replace("FILE", str(texts(tmp_path))) for one in overrides]
    (problem,) = pretraining_problems(config(*given), [])
    assert said in str(problem)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("ptx.file_weights=[0]", "ptx.file_weights=[0.0] must be > 0 and finite; try: [1.0]"),
        ("ptx.coef=-1", "ptx.coef=-1 must be >= 0"),
        ("ptx.mini_batch_size=0", "ptx.mini_batch_size=0 must be >= 1"),
        ("ptx.max_length=1", "ptx.max_length=1 must be >= 2"),
        ("ptx.truncation=middle", "ptx.truncation=middle must be one of error, left, right, drop"),
        ("ptx.bad_rows=leave", "ptx.bad_rows=leave must be one of error, skip"),
        ("ptx.loss_on=al", "ptx.loss_on=al must be one of answers, last, all; did you mean: all"),
    ],
)
def test_single_values(override: str, said: str) -> None:
    """Would not catch limits of keys that are not listed here."""
    (problem,) = (problem for problem in value_problems(config(override)) if "ptx." in str(problem))
    assert said in str(problem)


PLANNED = (
    *("data.max_prompt_length=20", "data.max_response_length=12", "actor_rollout_ref.rollout.n=1"),
    *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
    *("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "ptx.mini_batch_size=6", "ptx.max_length=64"),
)


def test_plan_counts_their_passes() -> None:
    """Eight samples of 32 tokens in two passes of four rows, then six examples of 64 in two: the largest has 4 * 64
    tokens, of which 4 * 63 may count. Would not catch a ledger that forgets a phase, which reads these blocks."""
    without, mixed = (Placement.of(config(*PLANNED, f"ptx.coef={coef}")).leader for coef in (0, 1))
    own, both = (
        passes_of(config(*PLANNED), role, UPDATE, role.update, dp_size=1, multiple=1) for role in (without, mixed)
    )
    assert (own.num_blocks, own.block.tokens, own.block.response_tokens, own.block.longest) == (2, 128, 48, 32)
    assert (both.num_blocks, both.block.tokens, both.block.response_tokens, both.block.longest) == (4, 256, 252, 64)
    assert passes_of(config(*PLANNED), mixed, SCORE, mixed.score, dp_size=1, multiple=1).block.tokens < 512


def test_time_of_their_passes() -> None:
    """Examples of half their longest in every update; as many and as long as the samples they take as long as those.
    Would not catch samples that are longer in truth."""
    load = Load(num_samples=8, prompt=20.0, response=12.0, max_response=12, mini_batch=8, block_tokens=128)
    run = config(*PLANNED, "ptx.coef=1")
    found = updated_load(load, Placement.of(run).leader, run)
    assert found.mixed is not None
    assert (found.mixed.num_samples, found.mixed.length, found.mixed.block_tokens) == (6, 32.0, 128)
    model = ModelCost(10**7, 10**7, 4, 64, 64, 512)
    estimator = Estimator(model, Layout(1, 1), load_hardware("h100"), "float32")
    equal = dataclasses.replace(load, mixed=dataclasses.replace(load, prompt=32.0, response=0.0))
    twice = dataclasses.replace(load, num_samples=16, mini_batch=16)
    assert estimator.train(equal) == pytest.approx(estimator.train(twice), rel=1e-6)
    assert estimator.train(equal) > 1.2 * estimator.train(load)
