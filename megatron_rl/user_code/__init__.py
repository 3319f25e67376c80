"""Runs code of the user's in processes of its own: time limits, kills, plain replies."""
