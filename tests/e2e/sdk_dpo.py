"""A step of DPO by the SDK's `forward_backward_custom`; run by a Python that has the SDK.

    python sdk_dpo.py URL KEY FOLDER

FOLDER/pairs.json: the place of a torch, and of each pair the tokens of the prompt and of both responses. It prints a
line of JSON: the log-probs of each response's tokens before the step, and after it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

GIVEN = json.loads(Path(sys.argv[3], "pairs.json").read_text())
sys.path.append(GIVEN["torch"])  # behind the SDK's packages

import tinker  # noqa: E402
import torch  # noqa: E402
from tinker import types  # noqa: E402

BETA = 0.1
ADAM = types.AdamParams(learning_rate=0.05, beta1=0.9, beta2=0.999, eps=1.0, grad_clip_norm=1.0)


def datum(prompt: list[int], response: list[int]) -> types.Datum:
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(response)
    inputs = {"target_tokens": prompt[1:] + response, "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(prompt + response[:-1]), loss_fn_inputs=inputs)


def responses(data: list, log_probs: list) -> list[torch.Tensor]:
    """The log-probs of each response's tokens."""
    kept = (datum.loss_fn_inputs["weights"].to_torch() > 0 for datum in data)
    return [row[where] for row, where in zip(log_probs, kept, strict=True)]


def main(url: str, key: str) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client("assets/demo/model", rank=0).result()
    data = [datum(prompt, response) for prompt, *both in GIVEN["pairs"] for response in both]

    def present() -> list[torch.Tensor]:
        outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
        return responses(data, [one["logprobs"].to_torch() for one in outputs])

    def loss(data: list, log_probs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        rows = zip(responses(data, log_probs), reference, strict=True)
        ratios = torch.stack([row.sum() - before.sum() for row, before in rows])
        total = -torch.nn.functional.logsigmoid(BETA * (ratios[::2] - ratios[1::2])).mean()
        return total, {"dpo": float(total)}

    reference = present()
    client.forward_backward_custom(data, loss).result()
    client.optim_step(ADAM).result()
    print(json.dumps([[row.tolist() for row in rows] for rows in (reference, present())]))


if __name__ == "__main__":
    main(*sys.argv[1:3])
