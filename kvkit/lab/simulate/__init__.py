"""`kvkit simulate`: traces through nodes and tiers, by the functions of the cache."""
