"""The laboratory: what studies caches and is no part of one. Nothing outside of it imports it."""
