"""Benchmarks of servers: standard KV cache workloads, a client, and reports of its measurements."""
