"""The fastest placement and layout for a model, a cluster and a workload. Pure: it starts nothing."""
