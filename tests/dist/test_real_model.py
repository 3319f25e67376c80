"""A published chat model: what transformers makes of it, in a layout of three tensor ranks, through its own template.

Runs where `python scripts/make_real_model.py` has put SmolLM2-135M-Instruct.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from ranks import run_ranks
from rollout_checks import ask, logprob_difference, tokens
from safetensors.torch import load_file
from tiny_models import run_config

from megatron_rl.records import Batch, Sampling, ragged

REAL = Path(__file__).parents[2] / "assets/real"
pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not (REAL / "real.json").is_file(), reason=f"no model in {REAL}: scripts/make_real_model.py"),
]

NUM_ROWS = 4
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=-1, max_tokens=8, salt=0)
LAYOUTS = {"TP3-to-TP3": (3, 3, 1, 3), "PP2-to-TP1": (2, 1, 2, 1)}


def reviews() -> Batch:
    """The first held-out reviews, as the chat template writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REAL / "model")
    rows = pyarrow.parquet.read_table(REAL / "test.parquet").slice(0, NUM_ROWS).to_pylist()
    ids = [
        torch.tensor(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False))
        for row in rows
    ]
    return Batch(
        index=torch.arange(NUM_ROWS),
        sample=torch.zeros(NUM_ROWS, dtype=torch.int64),
        input_ids=ragged(ids),
        data_source=["demo/sentiment"] * NUM_ROWS,
        ground_truth=[""] * NUM_ROWS,
        extra_info=[{}] * NUM_ROWS,
        uid=torch.arange(NUM_ROWS),
    )


def transformers_greedy() -> list[list[int]]:
    """Answers up to and with the end of the turn."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(REAL / "model", dtype=torch.float32).eval()
    answers = []
    for ids in reviews()["input_ids"].unbind():
        found = model.generate(ids[None], max_new_tokens=GREEDY.max_tokens, do_sample=False)
        answers.append(found[0, len(ids) :].tolist())
    return answers


def through_the_engine(config, exported: Path) -> dict:
    """One rank's answers, their log-probs' distance from the trainer's, and the export."""
    from megatron_rl.roles.host import RankHost

    worker = RankHost(config)
    worker.build("actor")
    worker.build("rollout")
    worker.roles["rollout"].enter()
    answers: Batch = ask(worker.roles["rollout"], reviews(), GREEDY)
    worker.roles["rollout"].exit()
    distance = logprob_difference(worker, answers)
    worker.roles["actor"].export_hf(exported)
    return {"greedy": tokens(answers), "distance": distance}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_smollm2_answers_as_in_transformers(layout: str, tmp_path: Path) -> None:
    """Its greedy answers to reviews; vLLM's log-probs are the trainer's to 2e-4; the export is what was read.

    Would not catch a wrong template: both sides get the same tokens.
    """
    world_size, tp_size, pp_size, rollout_tp = LAYOUTS[layout]
    rollout = "actor_rollout_ref__rollout__"
    keys = {f"{rollout}tensor_model_parallel_size": rollout_tp, f"{rollout}kv_cache_memory_bytes": 1 << 26}
    config = run_config(str(REAL / "model"), tp_size, pp_size, **keys)
    ranks = run_ranks(world_size, through_the_engine, config, tmp_path / "exported", timeout=350)
    expected = transformers_greedy()
    assert all(rank["greedy"] == expected for rank in ranks)
    distances = [rank["distance"] for rank in ranks if rank["distance"] is not None]
    assert distances and max(distances) < 2e-4

    before = load_file(REAL / "model/model.safetensors")
    after = {}
    for file in (tmp_path / "exported").glob("*.safetensors"):
        after |= load_file(file)
    assert before.keys() == after.keys()
    assert [name for name, tensor in before.items() if not torch.equal(tensor, after[name])] == []
