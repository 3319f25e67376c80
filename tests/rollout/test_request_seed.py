"""The seed of one request."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.rollout.seeds import request_seed

number = st.integers(0, 2**40)
requests = st.tuples(number, number, number, number)


def test_pinned_values():
    """Samples of old runs can be drawn again. Would not catch an engine that ignores the seed."""
    assert request_seed(0, 0, 0, 0) == 8000154919901005727
    assert request_seed(1, 2, 3, 4) == request_seed(run_seed=1, salt=2, prompt_index=3, sample=4) == 2930429999423258495


def test_distinct_over_every_argument():
    """All of 6 x 10 x 20 x 12 requests, and digits that could run together. Would not catch a chance collision."""
    asked = list(itertools.product(range(6), range(10), range(20), range(12)))
    assert len({request_seed(*request) for request in asked}) == len(asked)
    assert len({request_seed(1, 12, 3, 0), request_seed(1, 1, 23, 0), request_seed(11, 2, 3, 0)}) == 3


@settings(max_examples=60, deadline=None)
@given(first=requests, second=requests)
def test_in_range_and_a_function_of_the_request(first, second):
    """vLLM takes a signed 64-bit seed. Would not catch seeds that are close together."""
    assert 0 <= request_seed(*first) < 2**63
    assert (request_seed(*first) == request_seed(*second)) == (first == second)
