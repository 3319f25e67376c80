"""What must not be done while a graph is captured, one fault a function of one line; run by test_fake_graphs.py:
`python graph_faults.py LIBRARY` prints one JSON object, name -> [what was said, its own line].
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from third_party_patches.torch import fake_cuda

KEPT = []


def fault_reads_a_number(torch, x):
    x.sum().item()


def fault_asks_whether_one_is_true(torch, x):
    bool((x > 0).any())


def fault_copies_to_the_host(torch, x):
    x.cpu()


def fault_copies_to_the_host_without_waiting(torch, x):
    torch.zeros(4).copy_(x, non_blocking=True)


def fault_has_a_shape_of_values(torch, x):
    x.nonzero()


def fault_selects_by_a_mask(torch, x):
    x[x > 0]


def fault_copies_pageable_memory(torch, x):
    x.copy_(torch.ones(4), non_blocking=True)


def fault_brings_pageable_memory(torch, x):
    torch.ones(4).to("cuda", non_blocking=True)


def fault_brings_a_list(torch, x):
    torch.tensor([1.0, 2.0], device="cuda")


def fault_pins_memory(torch, x):
    torch.ones(4).pin_memory()


def fault_waits_for_the_device(torch, x):
    torch.cuda.synchronize()


def fault_waits_for_a_stream(torch, x):
    torch.cuda.current_stream().synchronize()


def fault_waits_for_an_event(torch, x):
    torch.cuda.Event().synchronize()


def fault_allocates_in_another_pool(torch, x):
    torch.cuda.use_mem_pool(None).__enter__()


def fault_captures_inside(torch, x):
    torch.cuda.graph(torch.cuda.CUDAGraph()).__enter__()


def fault_keeps_what_it_made(torch, x):
    KEPT.append(x + 1)


def fine_computes_and_copies_pinned_memory(torch, x):
    (x + 1).copy_(KEPT[0], non_blocking=True).sum().mul_(2.0)


def main(library: str) -> None:
    fake_cuda.load(Path(library))
    import fake_graphs
    import torch

    from megatron_rl.rehearse.memory_tracker import MemoryTracker
    from third_party_patches.torch import fake_parameters

    for patch in (fake_cuda, fake_parameters):
        patch.PATCH.apply()
    found = {}
    for name, fault in list(globals().items()):
        if name.startswith(("fault_", "fine_")):
            mode = fake_graphs.CapturingMode(torch.device("cuda", 0), MemoryTracker())
            fake_cuda.GPU.on_wait = mode.wait
            fake_graphs.apply(mode)
            said = ""
            with mode:
                x = torch.ones(4, device="cuda")
                KEPT[:] = [torch.ones(4).pin_memory()]
                try:
                    with torch.cuda.graph(torch.cuda.CUDAGraph()):
                        fault(torch, x)
                    mode.must_be_gone()
                except fake_graphs.CaptureError as error:
                    said = str(error)
            found[name] = said, fault.__code__.co_firstlineno + 1
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
