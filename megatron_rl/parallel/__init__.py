"""Process grids and the two sets of groups that live side by side: Megatron's and the rollout's."""
