"""Check and plan a run before it starts: rules, layout, batches, memory and time."""
