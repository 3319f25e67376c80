"""`megatron-rl serve`, as clients and signals meet it: requests over HTTP, kill -9, the journal's repetition."""

from __future__ import annotations

import json
import math
import re
import signal
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from command_line import REPOSITORY, CommandLine
from service_client import (
    ALONE,
    BASE,
    CUTS,
    KEYS,
    LAYOUTS,
    ONE,
    ONLY_ACTOR,
    ROW,
    TOKENS,
    TrainingService,
    a_pass,
    create,
    log_probs_of,
    numbers,
    sample,
    two_steps,
)
from stage_files import keys_of, write_files
from sweeps import often
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.serve.protobuf import decoded
from megatron_rl.serve.request_journal import records
from megatron_rl.serve.tinker_messages import SAMPLE_RESPONSE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def saved_for_two_hours(service: TrainingService, model: str) -> str:
    """The path of a state, after a look at all lists that have it."""
    state = {"model_id": model, "seq_id": 7, "path": "old", "ttl_seconds": 3600}
    path = json.loads(service.done("save_weights", state)[1])["path"]
    run = f"training_runs/{model}"
    [row] = [one for one in service.read(f"{run}/checkpoints")["checkpoints"] if one["checkpoint_type"] == "training"]
    assert row["tinker_path"] == path and row["size_bytes"] + 4 == sum(map(len, service.saved(path)[0].values()))
    assert service.read(run)["last_checkpoint"] == row and service.read(f"{run}/checkpoints", "bert") == 404
    assert service.read("training_runs?limit=1&offset=0")["cursor"]["total_count"] == 1
    assert service.read("checkpoints?limit=x") == service.read("checkpoints?offset=-1") == 400
    assert [row["checkpoint_id"] for row in service.read("checkpoints?limit=2&offset=1")["checkpoints"]] == [
        "sampler_weights/sampler-6",
        "sampler_weights/sampler-3",
    ]
    assert (
        service.read("sessions/session-0")["training_run_ids"] == [model] and service.read("sessions/session-1") == 404
    )
    asked = {"ttl_seconds": 7200}
    assert service.read(f"{run}/checkpoints/weights/old/ttl", "bert", "PUT", asked) == 404
    assert service.read(f"{run}/checkpoints/weights/old/ttl", method="PUT", body={"ttl_seconds": 7}) == 400
    assert service.read(f"{run}/checkpoints/weights/old/ttl", method="PUT", body=asked) == {}
    assert service.read(f"{run}/checkpoints/weights/..%2Fold", method="DELETE") == 404
    return path


def two_hours_ago(journal: Path) -> None:
    """Have all requests of a journal be two hours older."""
    whole = b""
    for head, content in records(journal):
        whole += (
            json.dumps(head | ({"at": head["at"] - 7200} if "at" in head else {})).encode() + b"\n" + content + b"\n"
        )
    journal.write_bytes(whole)


@pytest.fixture(
    params=[("one process, adapters", 4, (*ALONE, "actor_rollout_ref.model.lora.rank=4"))], ids=lambda x: x[0]
)
def service(request, tmp_path: Path) -> Iterator[TrainingService]:
    _, _, overrides = request.param
    service = TrainingService(tmp_path, *overrides)
    yield service
    service.line.kill_all()


def test_clients_train_and_sample_and_a_killed_service_continues(service: TrainingService, tmp_path: Path) -> None:
    """Two tenants in turns get what each gets alone; what an old version samples stays; kill -9 loses nothing.

    Why: a tenant's state leaves and comes back byte for byte, micro-batches are a tenant's own, and the journal has all
    that was replied to. Would not catch a sample that a later weight has changed below 5e-5.
    """
    anna, bert = create(service, "anna", 4), create(service, "bert", 4)
    alone = two_steps(service, anna, "anna")
    assert [service.ask("get_info", {"model_id": anna}, tenant)[0] for tenant in ("anna", "bert")] == [200, 404]
    beside = two_steps(service, bert, "bert")
    is_equal = [mine == theirs.replace(b"session-1", b"session-0") for mine, theirs in zip(alone, beside, strict=True)]
    assert is_equal[:3] == [True] * 3 and is_equal[4:7] == [True] * 3  # seeds of samples have the session in them
    before, after = log_probs_of(alone[0]), log_probs_of(alone[4])
    assert sum(after) > sum(before) + 1
    assert "grad_norm:max" in json.loads(alone[1])["metrics"]
    drawn = decoded(alone[3], SAMPLE_RESPONSE)
    of_prompt = numbers(drawn["prompt_logprobs"])
    assert math.isnan(of_prompt[0]) and of_prompt[1:] == pytest.approx(after[: len(TOKENS) - 1], abs=5e-5)
    again = {"temperature": 0.0, "stop": [1]}
    old = [service.done("asample", sample(f"session-0:sample:{place}", 9, **again))[1] for place in (1, 4)]
    assert old[0] != old[1]

    run, path = f"training_runs/{anna}", saved_for_two_hours(service, anna)
    service.line.kill_all()
    two_hours_ago(service.line.run / "journal")
    revived = TrainingService(tmp_path, *ALONE, "actor_rollout_ref.model.lora.rank=4")
    try:
        assert "21 replies are the same" in revived.line.text()
        revived.line.wait_for(lambda: not revived.saved(path), timeout=30)
        assert len(revived.read(f"{run}/checkpoints")["checkpoints"]) == 2
        assert revived.read(f"{run}/checkpoints/weights/old", method="DELETE") == 404
        assert two_steps(revived, anna, "anna") == alone  # the same requests again: nothing runs twice
        for place, content in zip((1, 4), old, strict=True):
            assert revived.done("asample", sample(f"session-0:sample:{place}", 9, **again))[1] == content
            new = decoded(revived.done("asample", sample(f"session-0:sample:{place}", 10, **again))[1], SAMPLE_RESPONSE)
            was = decoded(content, SAMPLE_RESPONSE)
            assert [one["tokens"] for one in new["sequences"]] == [one["tokens"] for one in was["sequences"]]
        assert len(two_steps(revived, anna, "anna", first=8)) == 8
        assert revived.ask("retrieve_future", {"request_id": f"{anna}:1"}, "bert")[0] == 404
        for head in ({"Host": "evil.example"}, {"X-API-Key": "tml-other-0123456789"}, {"Content-Encoding": "zstd"}):
            assert 400 <= revived.ask("create_session", {}, **head)[0] < 500
        assert revived.ask("optim_step", {"model_id": "x" * (17 << 20)})[0] == 413
        revived.line.process.send_signal(signal.SIGTERM)
        assert revived.line.wait() == 0, revived.line.text()
    finally:
        revived.line.kill_all()
    assert KEYS["anna"].encode() not in (revived.line.run / "journal").read_bytes()
    assert sum(head["kind"] == "reply" for head, _ in records(revived.line.run / "journal")) == 32  # one drops a copy


GREEDY = {"temperature": 0.0}


def whole_tokens(reply: dict) -> list[int]:
    return numbers(reply["sequences"][0]["tokens"], "i")


def check_stop(service: TrainingService) -> None:
    """A text of the second and third digit ends the base's response with these."""
    base = {"session_id": "session-0", "sampling_session_seq_id": 99, "base_model": BASE}
    assert service.ask("create_sampling_session", base)[0] == 200
    whole, cut = [], []
    for number, options, found in ((1, {}, whole), (2, {"stop": ""}, cut)):
        if "stop" in options:
            options["stop"] = "".join("0123456789"[one - 4] for one in whole[1:3])
        asked = sample("session-0:sample:99", number, **GREEDY, **options)
        reply = decoded(service.done("asample", asked)[1], SAMPLE_RESPONSE)
        found += whole_tokens(reply)
        assert reply["sequences"][0]["stop_reason"] == 0
    assert len(whole) == 4 and cut == whole[:3]


def check_top(reply: dict) -> None:
    """All 64 tokens in each place of the prompt: their probabilities are 1 in sum, and that of its token is its own."""
    top, of_prompt = reply["topk_prompt_logprobs"], numbers(reply["prompt_logprobs"])
    ids, log_probs = numbers(top["token_ids"], "i"), numbers(top["logprobs"])
    assert (top["k"], top["length"]) == (64, len(TOKENS)) and ids[:64] == [0] * 64 and set(log_probs[:64]) == {-99999.0}
    for place in range(1, len(TOKENS)):
        mine = dict(zip(ids[64 * place :][:64], log_probs[64 * place :][:64], strict=True))
        assert sum(map(math.exp, mine.values())) == pytest.approx(1, abs=1e-5) and len(mine) == 64
        assert mine[TOKENS[place]] == pytest.approx(of_prompt[place], abs=5e-5)


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_layouts_reply_alike(tmp_path: Path) -> None:
    """Log-probs of all weights after two steps, and greedy samples with theirs, are the same to 5e-5 in every layout.

    Would not catch an error that one process has, too.
    """
    found = {}
    for layout, overrides in LAYOUTS.items():
        (tmp_path / layout).mkdir()
        service = TrainingService(tmp_path / layout, *overrides)
        try:
            model = create(service, "anna", 0)
            two_steps(service, model, "anna")
            log_probs = log_probs_of(service.done("forward_backward", a_pass(model, 7, forward_only=1))[1])
            asked = sample("session-0:sample:1", 9, **GREEDY) | {"topk_prompt_logprobs": 64}
            drawn = decoded(service.done("asample", asked)[1], SAMPLE_RESPONSE)
            check_top(drawn)
            found[layout] = log_probs, drawn["sequences"][0]
            check_stop(service)
        finally:
            service.line.kill_all()
    for layout, (log_probs, sequence) in found.items():
        assert log_probs == pytest.approx(found["one"][0], abs=5e-5), layout
        assert sequence["tokens"] == found["one"][1]["tokens"], layout
        assert numbers(sequence["logprobs"]) == pytest.approx(numbers(found["one"][1]["logprobs"]), abs=5e-5), layout


def numbered(model: str, row: tuple[int, ...]) -> list[tuple[str, dict | bytes]]:
    """Two steps of two passes each, what the model gives then, and its state."""
    found: list[tuple[str, dict | bytes]] = []
    for first in (1, 4):
        adam = {"model_id": model, "seq_id": first + 2, "adam_params": {"learning_rate": 0.01}}
        found += [("forward_backward", a_pass(model, first + place, row=row[place:])) for place in (0, 1)]
        found.append(("optim_step", adam))
    found.append(("forward_backward", a_pass(model, 7, row=row, forward_only=1)))
    return [*found, ("save_weights", {"model_id": model, "seq_id": 8, "path": "end"})]


def replies_of(service: TrainingService, requests: list[tuple[str, dict | bytes]], draw: Random | None) -> list[bytes]:
    """Replies in the order of the requests. draw: each is sent three times, and all in its order."""
    sent = [number for number in range(len(requests)) for _ in range(3 if draw else 1)]
    if draw:
        draw.shuffle(sent)
    futures = {}
    for number in sent:
        status, _, content = service.ask(*requests[number])
        assert status == 200 and futures.setdefault(number, content) == content
    return [service.reply(futures[number])[1] for number in range(len(requests))]


@pytest.mark.parametrize("layout", often(CUTS, (), [*CUTS][1:]))
def test_two_models_at_once_are_as_each_alone(layout: str, tmp_path: Path) -> None:
    """Each request comes three times and all in any order: replies, weights and moments are bit for bit as alone and in
    order. What a saved version samples stays over ten further steps.

    Would not catch what both ways get wrong.
    """
    rank = 4 if layout == "one" else 0
    service = TrainingService(tmp_path, *CUTS[layout])
    try:
        rows = (ROW, (9, 10, 14, 7, 4, 15, 5, 9, 1))
        alone = [replies_of(service, numbered(create(service, "anna", rank), row), None) for row in rows]
        states = [[service.saved(json.loads(replies.pop())["path"]) for replies in alone]]
        assert alone[0] != alone[1] and len(states[0][0]) >= 1
        both = [request for row in rows for request in numbered(create(service, "anna", rank), row)]
        mixed = replies_of(service, both, Random(layout))
        states.append([service.saved(json.loads(mixed.pop(place))["path"]) for place in (15, 7)][::-1])
        assert [mixed[:7], mixed[7:]] == alone and states[0] == states[1] and states[0][0] != states[0][1]

        model, adam = create(service, "anna", rank), {"adam_params": {"learning_rate": 0.01}}
        saved = {"model_id": model, "seq_id": 1, "path": "old"}
        path = json.loads(service.done("save_weights_for_sampler", saved)[1])["path"]
        session = {"session_id": "session-0", "sampling_session_seq_id": 0, "model_path": path}
        assert service.ask("create_sampling_session", session)[0] == 200
        drawn = []
        for first in (0, 22):
            for number in range(2, first, 2):
                service.done("forward_backward", a_pass(model, number))
                service.done("optim_step", adam | {"model_id": model, "seq_id": number + 1})
            content = service.done("asample", sample("session-0:sample:0", first, seed=7))[1]
            drawn.append(decoded(content, SAMPLE_RESPONSE)["sequences"])
        for before, after in zip(*drawn, strict=True):
            assert before["tokens"] == after["tokens"]
            assert numbers(before["logprobs"]) == pytest.approx(numbers(after["logprobs"]), abs=5e-5)
    finally:
        service.line.kill_all()


@pytest.fixture(scope="module")
def sdk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has the SDK, in an environment of its own."""
    folder = tmp_path_factory.mktemp("sdk")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/pip", "install", "-q", "tinker==0.38.0"], check=True, timeout=600)
    return folder / "bin/python"


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_the_sdks_loop_learns_and_its_journal_repeats(sdk: Path, tmp_path: Path) -> None:
    """The demo's client: 0.38 of held-out sums are right before, at least 0.95 after 20 steps of each of three seeds.

    Then every reply is the same in a repetition of the journal, samples among them. Would not catch what the loop does
    not call.
    """
    service = TrainingService(tmp_path, *ALONE)
    try:
        for seed in ("1", "2", "3"):
            client = [sdk, "scripts/demo_tinker_loop.py", service.url, KEYS["anna"], "20", seed]
            ended = subprocess.run(client, cwd=REPOSITORY, capture_output=True, text=True, timeout=900)
            print(f"seed {seed}: {ended.stdout}")
            shares = [float(share) for share in re.findall(r"step \d+: (\S+) of", ended.stdout)]
            assert len(shares) == 5 and shares[0] < 0.5 and shares[-1] >= 0.95, (ended.stdout, ended.stderr)
        service.line.process.send_signal(signal.SIGTERM)
        assert service.line.wait() == 0, service.line.text()
        (tmp_path / "again").mkdir()
        again = CommandLine(tmp_path / "again", "--replay", str(service.line.run / "journal"), *ALONE, stage="serve")
        assert again.wait(timeout=2400) == 0, again.text()
        number, all_replies = re.search(r"(\d+) of (\d+) replies are the same, bit for bit", again.text()).groups()
        assert number == all_replies and int(number) > 3 * 20 * 64
    finally:
        service.line.kill_all()


@pytest.mark.exhaustive
@pytest.mark.weekly
@pytest.mark.timeout(3600)
def test_two_players_learn_from_each_other(sdk: Path, tmp_path: Path) -> None:
    """Each wins 0.9 of 400 games of Nim against the start, half of them begun, after 20 rounds of each of three seeds.

    A state has the bytes that `plan` names. Would not catch a player that learns from the other's turns, too, which
    tests/dist/test_summed_gradients.py does.
    """
    keys = (*ONLY_ACTOR, "actor_rollout_ref.model.lora.rank=8")
    plan = [sys.executable, "-m", "megatron_rl", "plan", "--config", "configs/demo_cpu.yaml", "--json", "--served", "3"]
    planned = subprocess.run([*plan, *ONE, *keys], cwd=REPOSITORY, capture_output=True, check=True, timeout=300)
    part = json.loads(planned.stdout)["served"]["model_bytes"]
    service = TrainingService(tmp_path, "--local", *ONE, *keys)
    try:
        for seed in ("1", "2", "3"):
            client = [sdk, "scripts/self_play.py", service.url, KEYS["anna"], "8", "20", seed]
            ended = subprocess.run(client, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200)
            print(f"seed {seed}: {ended.stdout}")
            shares = [float(share) for share in re.findall(r"[01]\.\d{3}", ended.stdout)]
            assert len(shares) == 4 and max(shares[:2]) < 0.8 and min(shares[2:]) >= 0.9, (
                ended.stdout,
                ended.stderr,
            )
        rows = service.read("checkpoints?limit=1000")["checkpoints"]
        sizes = [row["size_bytes"] for row in rows if row["checkpoint_type"] == "training"]
        assert sizes == [part["weights"] + part["moments"]] * 3
    finally:
        service.line.kill_all()


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_dpo_by_the_sdks_custom_loss_is_dpo(sdk: Path, tmp_path: Path) -> None:
    """After a step the log-probs of all responses are those of the model that `dpo` leaves, to 1e-5.

    Would not catch a step that is small: most log-probs change by more than 1e-3.
    """
    lines = (write_files(tmp_path) / "pairs_train.jsonl").read_text().splitlines()[:16]
    for split in ("train", "val"):
        (tmp_path / f"pairs_{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    optim = ("lr=0.05", "eps=1.0", "weight_decay=0.0", "clip_grad=1.0")
    keys = (*keys_of(tmp_path, "dpo"), *(f"actor_rollout_ref.actor.optim.{one}" for one in optim))
    run = CommandLine(tmp_path, "--local", *ONE, *keys, "trainer.total_training_steps=1", stage="dpo")
    assert run.wait() == 0, run.text()
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / BASE)
    pairs = [json.loads(line) for line in lines]
    pairs = [[tokenizer.encode(one[name]) for name in ("prompt", "chosen", "rejected")] for one in pairs]
    pairs = [[prompt, *([*response, 1] for response in both)] for prompt, *both in pairs]
    given = {"torch": str(Path(torch.__file__).parents[1]), "pairs": pairs}
    (tmp_path / "pairs.json").write_text(json.dumps(given))
    (tmp_path / "service").mkdir()
    service = TrainingService(tmp_path / "service", *ALONE)
    try:
        client = [sdk, "tests/e2e/sdk_dpo.py", service.url, KEYS["anna"], tmp_path]
        ended = subprocess.run(client, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stderr
        before, after = json.loads(ended.stdout)
    finally:
        service.line.kill_all()
    model = AutoModelForCausalLM.from_pretrained(run.run / "hf_model").float()
    rows = [(prompt, response) for prompt, *both in pairs for response in both]
    moved = []
    for (prompt, response), old, new in zip(rows, before, after, strict=True):
        tokens = torch.tensor([[*prompt, *response]])
        with torch.no_grad():
            log_probs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        assert new == pytest.approx(log_probs[len(prompt) - 1 :].tolist(), abs=1e-5)
        moved += [abs(one - other) for one, other in zip(old, new, strict=True)]
    print(f"log-probs moved by {statistics.median(moved):.4f}, at most {max(moved):.4f}")
    assert statistics.median(moved) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.weekly
def test_the_page_has_what_the_sdk_gets(sdk: Path, tmp_path: Path) -> None:
    """Each call of `sdk_calls.py` is served or refused as docs/train/serve.md has it. Would not catch wrong numbers."""
    service = TrainingService(tmp_path, *ALONE)
    try:
        client = [sdk, "tests/e2e/sdk_calls.py", service.url, KEYS["anna"]]
        ended = subprocess.run(client, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=True)
        outcomes = json.loads(ended.stdout)
    finally:
        service.line.kill_all()
    assert "wrong" not in outcomes.values()
    page = (REPOSITORY / "docs/train/serve.md").read_text()
    for title, start in (("served", "served"), ("refused", "refused: 4")):
        names = ", ".join(f"`{name}`" for name, outcome in outcomes.items() if outcome.startswith(start))
        assert f"| {title} | {names} |" in page
