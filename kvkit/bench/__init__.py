"""Benchmarks of servers: the field's workloads, a client, and what it measured."""
