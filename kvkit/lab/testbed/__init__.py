"""Servers, engines and problems that tests and benchmarks run kvkit against."""
