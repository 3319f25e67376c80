"""Bytes and seconds of a run before it starts: the planner and the search for placements. No torch."""
