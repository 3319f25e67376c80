"""Which replica draws which samples with which weights: decided in counted units, so that a run can be repeated."""
