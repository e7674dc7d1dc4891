"""Servers, toy engines and small problems of kernels, for tests and benchmarks alike."""
