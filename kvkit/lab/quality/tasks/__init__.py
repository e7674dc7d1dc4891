"""Samples of tasks, for the measurement of quality."""
