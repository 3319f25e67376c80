"""Calls of the Tinker API's SDK, each by its name in docs/train/serve.md; run by a Python that has the SDK.

    python sdk_calls.py URL KEY

It prints a line of JSON: name -> "served", or the beginning of the refusal.
"""

from __future__ import annotations

import json
import sys

import tinker
from tinker import types

BASE, ROW = "assets/demo/model", (5, 6, 14, 7, 8, 15, 8, 9, 1)
PROMPT = types.ModelInput.from_ints(list(ROW[:6]))
SAMPLED = {"logprobs": [-1.0] * 8, "advantages": [0.0] * 5 + [0.5] * 3}
MASK = {"sequence_ratio_mask": [0.0] * 5 + [1.0] * 3}
ONE = types.SamplingParams(max_tokens=2)


def data(**columns: list[float]) -> list[types.Datum]:
    inputs = {"target_tokens": list(ROW[1:])} | columns
    return [types.Datum(model_input=types.ModelInput.from_ints(list(ROW[:-1])), loss_fn_inputs=inputs)]


class Calls:
    """Each call, in the order in which a loop would make them. All of them return something that is true."""

    def __init__(self, url: str, key: str) -> None:
        self.service = tinker.ServiceClient(base_url=url, api_key=key)
        self.rest = self.service.create_rest_client()
        self.client = self.service.create_lora_training_client(base_model=BASE, rank=0).result()
        self.state = self.sampler = None

    def passed(self, loss: str, columns: dict, **settings: float) -> bool:
        return bool(self.client.forward_backward(data(**columns), loss, settings or None).result().loss_fn_outputs)

    def saved(self, **options: object) -> bool:
        self.state = self.client.save_state("one", overwrite=True, **options).result().path
        return self.state.endswith("/weights/one")

    def sampling(self) -> bool:
        self.sampler = self.client.save_weights_and_get_sampling_client().result()
        return True

    def drawn(self, **options: object) -> bool:
        return bool(self.sampler.sample(PROMPT, 1, ONE, **options).result().sequences)

    @property
    def run(self) -> str:
        return self.client.get_info().model_id

    def table(self) -> dict:
        """Name -> call."""
        weights = {"weights": [1.0] * 8}
        losses = {
            name: lambda name=name: self.passed(name, SAMPLED)
            for name in ("importance_sampling", "ppo", "cispo", "dro")
        }
        return losses | {
            "cross_entropy": lambda: self.passed("cross_entropy", weights),
            "gspo": lambda: self.passed("gspo", SAMPLED | MASK),
            "sapo": lambda: self.passed("sapo", SAMPLED | MASK, tau_pos=1.1),
            "stable_reinforce": lambda: self.passed("stable_reinforce", SAMPLED),
            "forward": lambda: self.client.forward(data(**weights), "cross_entropy").result().loss_fn_outputs,
            "optim_step": lambda: self.client.optim_step(types.AdamParams(learning_rate=1e-4)).result().metrics,
            "get_server_capabilities": lambda: self.service.get_server_capabilities().supported_models,
            "save_state": lambda: self.saved(ttl_seconds=3600),
            "load_state": lambda: self.client.load_state(self.state).result().path == self.state,
            "load_state_with_optimizer": lambda: self.client.load_state_with_optimizer(self.state).result(),
            "create_training_client_from_state": lambda: self.service.create_training_client_from_state(self.state),
            "save_weights_for_sampler": lambda: self.client.save_weights_for_sampler("two").result().path,
            "create_sampling_client": lambda: self.service.create_sampling_client(
                model_path=self.client.save_weights_for_sampler("three").result().path
            ),
            "save_weights_and_get_sampling_client": self.sampling,
            "sample": self.drawn,
            "compute_logprobs": lambda: len(self.sampler.compute_logprobs(PROMPT).result()) == 6,
            "topk_prompt_logprobs": lambda: self.top_of_prompt(3),
            "topk_sample_logprobs": lambda: self.drawn(topk_sample_logprobs=3),
            "list_training_runs": lambda: self.rest.list_training_runs().result().training_runs,
            "get_training_run": lambda: self.rest.get_training_run(self.run).result().last_checkpoint,
            "list_checkpoints": lambda: len(self.rest.list_checkpoints(self.run).result().checkpoints) == 4,
            "list_user_checkpoints": lambda: self.rest.list_user_checkpoints().result().checkpoints,
            "list_sessions": lambda: self.rest.list_sessions().result().sessions,
            "get_session": lambda: self.rest.get_session(self.run.partition(":")[0]).result().training_run_ids,
            "get_weights_info_by_tinker_path": lambda: self.rest.get_weights_info_by_tinker_path(self.state).result(),
            "set_checkpoint_ttl_from_tinker_path": lambda: (
                self.rest.set_checkpoint_ttl_from_tinker_path(self.state, 7200).result() is None
            ),
            "publish_checkpoint_from_tinker_path": lambda: (
                self.rest.publish_checkpoint_from_tinker_path(self.state).result() is None
            ),
            "delete_checkpoint_from_tinker_path": lambda: (
                self.rest.delete_checkpoint_from_tinker_path(self.state).result() is None
            ),
            "close": lambda: self.service.close("success").result() is None,
        }

    def top_of_prompt(self, k: int) -> bool:
        asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": k}
        rows = self.sampler.sample(PROMPT, 1, ONE, **asked).result().topk_prompt_logprobs
        return rows[0] is None and all(len(row) == k for row in rows[1:])


def outcome(call) -> str:
    try:
        return "served" if call() else "wrong"
    except tinker.APIStatusError as error:
        return f"refused: {error.status_code}"


if __name__ == "__main__":
    calls = Calls(sys.argv[1], sys.argv[2])
    print(json.dumps({name: outcome(call) for name, call in calls.table().items()}))
