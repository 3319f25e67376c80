"""Search the fastest placement and layout for a model, a cluster and a workload. Pure: nothing is started."""
