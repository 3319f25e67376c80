"""Latent attention, shared experts and grouped routing: gradients and updates, in one process and in several."""

from __future__ import annotations

import pytest
from ranks import run_ranks
from sweeps import WEEKLY
from test_layout_parity import assert_same, relative, run_layout, whole_weights
from test_moe_parity import EP2, ETP1, SP, hugging_face_gradients, policy_gradients
from tiny_models import run_config, save_deepseek_v2, save_deepseek_v3, save_moonlight, save_qwen2_moe

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300), pytest.mark.exhaustive]

LAYOUTS = {
    "TP2, ETP2": ((2, 2, 1), SP),
    "TP2, PP2, EP2, ETP1": ((4, 2, 2), SP | EP2 | ETP1),
    "DP2, EP2": ((2, 1, 1), EP2),
}


@pytest.mark.parametrize(
    "save", [save_qwen2_moe, save_deepseek_v2, save_deepseek_v3, pytest.param(save_moonlight, marks=WEEKLY)]
)
def test_gradients_equal_hugging_face(save, tmp_path) -> None:
    """Every parameter's, before clipping, in one process. Would not catch errors of splitting: layouts do.

    Moonlight is weekly: its parts are those of DeepSeek-V3. The bias leaves an expert to no token in one of the models:
    its gradient is zero in both.
    """
    path = save(tmp_path)
    ours = whole_weights(run_ranks(1, policy_gradients, run_config(path, 1, 1)), "actor", path)
    expected = hugging_face_gradients(path)
    assert ours.keys() == expected.keys()
    idle = [name for name, gradient in expected.items() if not gradient.any()]
    assert len({name.rpartition(".experts.")[2].split(".")[0] for name in idle}) <= 1
    for name, gradient in expected.items():
        assert not ours[name].any() if name in idle else relative(ours[name], gradient) < 1e-4, name


@pytest.mark.parametrize("save", [save_qwen2_moe, save_deepseek_v3])
def test_layouts_equal_one_process(save, tmp_path) -> None:
    """Scores, gradient norms and an update, of actor and critic. Would not catch an error in one process, too."""
    path = save(tmp_path)
    reference = run_layout(path, 1, 1, 1)
    for ranks, sizes in LAYOUTS.values():
        assert_same(run_layout(path, *ranks, **sizes), reference, path)
