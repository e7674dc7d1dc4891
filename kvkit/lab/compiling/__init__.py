"""The compile gate: compiles every kernel for GPUs that are not here, and compares with the record."""
