"""kvkit: compute an LLM's KV cache once, use it everywhere. Start reading at `kvkit.cache`."""
