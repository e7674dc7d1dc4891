"""`kvkit simulate`: runs a trace through nodes and tiers with the cache's own functions."""
