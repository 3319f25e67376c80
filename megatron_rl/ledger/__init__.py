"""Bytes and seconds of a run before it starts: the clock, the planner and the search for placements. No torch."""
