"""One batch and one update give the same numbers with several chunks in a stage, and with stages of uneven size.

Why: whatever stage or chunk holds a layer, layers are applied in the order of the model, and a micro-batch's gradient
is added to those of others; the schedule only says when. A filler micro-batch, which an interleaved schedule needs, and
a filler row weigh nothing in any sum.

Not exercised: overlap of messages with work; more than two chunks; TP, DP and experts beside chunks, which
`tests/parity` has.
"""

from __future__ import annotations

from itertools import chain

import pytest
from sweeps import often
from tiny_models import save_llama, save_qwen2
from updates import assert_same, run_layout

from megatron_rl.config.megatron import COUNTED_PARTS
from megatron_rl.parallel.rank_grid import TrainGrid
from megatron_rl.parallel.stages import StagePlan

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

VPP2 = {"virtual_pipeline_model_parallel_size": 2}
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
COUNTED = dict.fromkeys(COUNTED_PARTS, True)
# 11 rows in micro-batches of 4 are 3, which the interleaved schedule fills up to 4. In micro-batches of 16 they are 1,
# filled up to 2; in those of 2 they are 6, of which the last has a filler row.
LAYOUTS = {
    "PP2, VPP2, one micro-batch": ((2, 1, 2), VPP2 | {"micro_batch": 16}),
    "stages of 1, 3": ((2, 1, 2), {FIRST: 1}),
    "stages of 2, 1, 1": ((3, 1, 3), {FIRST: 2, LAST: 1}),
    "stages of 1, 2, 1, embedding and loss counted": ((3, 1, 3), COUNTED),
}
"""Name -> (ranks, tp, pp) and further keys of run_layout. The models have 4 layers."""
OFTEN = ("stages of 2, 1, 1",)
"""What `make test` goes through: both ends uneven. A filler row is below, a filler micro-batch in `tests/parity`,
where VPP meets TP, DP and experts.
"""


@pytest.fixture(scope="module")
def tied_path(tmp_path_factory) -> str:
    return save_qwen2(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tied_reference(tied_path) -> list[dict]:
    return run_layout(tied_path, 1, 1, 1)


@pytest.mark.parametrize("layout", often(LAYOUTS, OFTEN))
def test_stage_layouts_equal_one_process(layout: str, tied_path: str, tied_reference: list[dict]) -> None:
    """Each rank holds its stage's layers, too. Would not catch filler micro-batches that only cost time."""
    sizes, keys = LAYOUTS[layout]
    results = run_layout(tied_path, *sizes, **keys)
    assert_same(results, tied_reference, tied_path)
    vpp_size = keys.get("virtual_pipeline_model_parallel_size", 1)
    counted = [keys.get(part, False) for part in COUNTED_PARTS]
    stages = StagePlan(4, sizes[2], vpp_size, keys.get(FIRST), keys.get(LAST), *counted)
    for r in results:
        layers = {int(name.split(".")[2]) for name in r["actor_weights"] if name.startswith("decoder.layers.")}
        assert layers == set(chain(*stages.layers(TrainGrid(*sizes).pp_rank(r["where"].rank))))


@pytest.mark.parametrize(
    ("num_layers", "counted"),
    [(4, {}), pytest.param(6, COUNTED, marks=pytest.mark.exhaustive)],
    ids=["even", "counted"],
)
def test_untied_head_in_chunks(tmp_path, num_layers: int, counted: dict[str, bool]) -> None:
    """A Llama with its own head, PP2 and VPP2, in six micro-batches: chunks of 1, or of 1, 2, 2 and 1 layers. Would not
    catch an error common to both runs.
    """
    path = save_llama(tmp_path, num_hidden_layers=num_layers)
    assert_same(run_layout(path, 2, 1, 2, micro_batch=2, **VPP2, **counted), run_layout(path, 1, 1, 1), path)
