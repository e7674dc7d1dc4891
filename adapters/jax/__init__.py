"""Pages of an engine in JAX, on any device, as records."""
