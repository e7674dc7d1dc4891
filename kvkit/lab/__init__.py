"""Tools that study caches and are not part of one. No code outside this package imports it."""
