"""Records on their way between pages and tiers."""
