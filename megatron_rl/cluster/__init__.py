"""The driver's side of the engine: reserve ranks, start a process on each, call them as one object. Uses Ray."""
