"""`kvkit doctor`: what is installed, and whether kernels and tiers work."""
