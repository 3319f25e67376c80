"""Pure tensor maths: advantages, policy, value, KL, entropy."""
