"""The effect of blending and of fewer bits on a model's answers."""
