"""Which layers each stage and chunk holds: by hand, by property, and as megatron-core computes it."""

from dataclasses import astuple
from itertools import chain

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_rl.config.megatron import MegatronConfig
from megatron_rl.parallel.stages import StagePlan

modest = settings(max_examples=200, deadline=None)


@st.composite
def sizes(draw) -> tuple:
    """(num_layers, pp, vpp, first, last, counts_embedding, counts_loss), most of which cannot be a plan."""
    num_layers, pp_size, vpp_size = draw(st.integers(1, 24)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    first, last = (draw(st.none() | st.integers(0, 8)) for _ in range(2))
    return num_layers, pp_size, vpp_size, first, last, draw(st.booleans()), draw(st.booleans())


@st.composite
def plans(draw) -> StagePlan:
    """Plans that are possible: even ones with and without a virtual pipeline, and uneven ones of both kinds."""
    pp_size, share = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if pp_size > 1 and draw(st.booleans()):
        vpp_size, counted = draw(st.integers(1, 4)), (draw(st.booleans()), draw(st.booleans()))
        return StagePlan(pp_size * vpp_size * (share + 1) - sum(counted), pp_size, vpp_size, None, None, *counted)
    if pp_size == 1 or draw(st.booleans()):
        vpp_size = draw(st.integers(1, 4)) if pp_size > 1 else 1
        return StagePlan(pp_size * vpp_size * share, pp_size, vpp_size)
    first, last = (draw(st.none() | st.integers(1, 8)) for _ in range(2))
    given_sizes = [layers for layers in (first, last) if layers is not None]
    return StagePlan(sum(given_sizes) + share * (pp_size - len(given_sizes)), pp_size, first=first, last=last)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (StagePlan(4, 1), [["0123"]]),
        (StagePlan(8, 2), [["0123"], ["4567"]]),
        (StagePlan(4, 2, vpp_size=2), [["0", "2"], ["1", "3"]]),
        (StagePlan(8, 2, vpp_size=2), [["01", "45"], ["23", "67"]]),
        (StagePlan(8, 2, vpp_size=4), [["0", "2", "4", "6"], ["1", "3", "5", "7"]]),
        (StagePlan(6, 3, vpp_size=2), [["0", "3"], ["1", "4"], ["2", "5"]]),
        (StagePlan(4, 2, first=1), [["0"], ["123"]]),
        (StagePlan(4, 2, last=1), [["012"], ["3"]]),
        (StagePlan(9, 4, first=3), [["012"], ["34"], ["56"], ["78"]]),
        (StagePlan(9, 4, last=3), [["01"], ["23"], ["45"], ["678"]]),
        (StagePlan(7, 4, first=1, last=2), [["0"], ["12"], ["34"], ["56"]]),
        (StagePlan(5, 2, first=2, last=3), [["01"], ["234"]]),
        (StagePlan(7, 4, counts_embedding=True), [["0"], ["12"], ["34"], ["56"]]),
        (StagePlan(6, 4, counts_embedding=True, counts_loss=True), [["0"], ["12"], ["34"], ["5"]]),
        (StagePlan(7, 2, 2, counts_loss=True), [["01", "45"], ["23", "6"]]),
        (StagePlan(6, 2, 2, counts_embedding=True, counts_loss=True), [["0", "34"], ["12", "5"]]),
    ],
)
def test_tables(plan, expected):
    """Written by hand, a digit for each layer. Would not catch an error in sizes that are not listed."""
    held = [[[*chunk] for chunk in plan.layers(stage)] for stage in range(plan.pp_size)]
    assert held == [[[int(digit) for digit in chunk] for chunk in stage] for stage in expected]


@modest
@given(plans())
def test_every_layer_is_held_once(plan):
    """In order of chunks, then stages, the layers count up. Would not catch shares that are badly balanced."""
    stages = [plan.layers(stage) for stage in range(plan.pp_size)]
    assert [len(chunks) for chunks in stages] == [plan.vpp_size] * plan.pp_size
    in_order = chain(*(stages[stage][chunk] for chunk in range(plan.vpp_size) for stage in range(plan.pp_size)))
    assert list(in_order) == list(range(plan.num_layers))
    assert all(len(chunk) >= 1 for chunks in stages for chunk in chunks)
    if plan.first is not None:
        assert len(stages[0][0]) == plan.first
    if plan.last is not None:
        assert len(stages[-1][0]) == plan.last


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_layers": 6, "pp_size": 4}, r"^pp\(4\) must divide num_hidden_layers\(6\)$"),
        ({"num_layers": 6, "pp_size": 2, "vpp_size": 2}, r"^pp\(2\) \* vpp\(2\) must divide num_hidden_layers\(6\)$"),
        ({"num_layers": 4, "pp_size": 1, "vpp_size": 2}, r"^vpp\(2\) needs pp\(1\) > 1$"),
        (
            {"num_layers": 6, "pp_size": 2, "vpp_size": 2, "first": 2},
            r"^first\(2\) and last\(None\) layers need pp\(2\) > 1 and vpp\(2\) = 1$",
        ),
        ({"num_layers": 4, "pp_size": 1, "last": 4}, r"need pp\(1\) > 1"),
        (
            {"num_layers": 6, "pp_size": 3, "first": 1},
            r"^first\(1\) and last\(None\) layers of pp\(3\) stages must leave equal shares "
            r"of num_hidden_layers\(6\) to the other 2 stages$",
        ),
        ({"num_layers": 6, "pp_size": 3, "first": 3, "last": 3}, "to the other 1 stages"),
        ({"num_layers": 6, "pp_size": 2, "first": 2, "last": 2}, r"must add up to num_hidden_layers\(6\)$"),
        ({"num_layers": 4, "pp_size": 2, "first": 0}, r"first\(0\)"),
        (
            {"num_layers": 6, "pp_size": 2, "counts_loss": True},
            r"^loss counted as layers: pp\(2\) must divide num_hidden_layers\(6\) \+ 1$",
        ),
        ({"num_layers": 3, "pp_size": 1, "counts_embedding": True}, r"^embedding counted as layers need pp\(1\) > 1$"),
        (
            {"num_layers": 2, "pp_size": 2, "vpp_size": 2, "counts_embedding": True, "counts_loss": True},
            r"num_hidden_layers\(2\) \+ 2 must be at least 2 for each chunk, and pp\(2\) \* vpp\(2\) makes 4 chunks$",
        ),
        ({"num_layers": 7, "pp_size": 2, "first": 3, "counts_loss": True}, r"need first\(3\) and last\(None\)"),
    ],
)
def test_impossible_plans(arguments, message):
    """The numbers and the rule are named. Would not catch a rule that is missing; the comparison with Megatron does."""
    with pytest.raises(ValueError, match=message):
        StagePlan(**arguments)


def test_from_config():
    """Each key is read, and no virtual size means one chunk. Would not catch keys that validation lets through."""
    even = MegatronConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3)
    assert StagePlan.from_config(6, even) == StagePlan(6, 2, vpp_size=3)
    uneven = MegatronConfig(
        pipeline_model_parallel_size=3, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=2
    )
    assert StagePlan.from_config(6, uneven) == StagePlan(6, 3, first=1, last=2)
    counted = MegatronConfig(pipeline_model_parallel_size=2, account_for_loss_in_pipeline_split=True)
    assert StagePlan.from_config(5, counted) == StagePlan(5, 2, counts_loss=True)


def megatron_config(
    num_layers: int, pp_size: int, vpp_size: int, first: int | None, last: int | None, embedding: bool, loss: bool
):
    import torch
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=pp_size,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=vpp_size if vpp_size > 1 else None,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
        account_for_embedding_in_pipeline_split=embedding,
        account_for_loss_in_pipeline_split=loss,
    )


def megatron_layers(config) -> list[list[range]]:
    """The layers of each stage and chunk; raises AssertionError for sizes Megatron does not build."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    def chunk(stage: int, vp_stage: int) -> range:
        start = get_transformer_layer_offset(config, vp_stage, stage)
        return range(start, start + get_num_layers_to_build(config, vp_stage, stage))

    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    stages = range(config.pipeline_model_parallel_size)
    return [[chunk(stage, vp_stage) for vp_stage in range(num_chunks)] for stage in stages]


@modest
@given(plans())
def test_megatron_builds_the_same_layers(plan):
    """Its own arithmetic, without processes. Would not catch a model that is not built by that arithmetic."""
    config = megatron_config(*astuple(plan))
    assert [plan.layers(stage) for stage in range(plan.pp_size)] == megatron_layers(config)


@modest
@given(sizes())
def test_megatron_refuses_the_same_sizes(numbers):
    """Apart from what is refused here on purpose; Megatron would also build a stage of -1 layers, which is no layout.

    Would not catch sizes that Megatron accepts and builds wrongly.
    """
    _, pp_size, vpp_size, first, last, *counted = numbers
    is_uneven = first is not None or last is not None or (pp_size == 1 and any(counted))
    assume(not (is_uneven and (vpp_size > 1 or pp_size == 1)) and not (vpp_size > 1 and pp_size == 1))
    try:
        StagePlan(*numbers)
        is_plan = True
    except ValueError:
        is_plan = False
    try:
        builds = all(chain(*megatron_layers(megatron_config(*numbers))))
    except (ValueError, AssertionError):
        builds = False
    assert is_plan == builds
