"""Check and plan a run before it starts: checks, layout, batches, memory and time, without torch.

`layout_search` looks for the fastest placement and layout.
"""
