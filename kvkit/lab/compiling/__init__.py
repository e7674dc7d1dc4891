"""The compile gate: every kernel compiled for GPUs that are not here, beside what is recorded."""
