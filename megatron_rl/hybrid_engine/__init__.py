"""The 3D hybrid engine: one memory for training and generation, and the plan that fills what a rank does not have."""
