"""Replicas driven through slices: in a thread of their own beside training, or in turns with it on the same ranks."""
