"""Tools that study caches and are not part of one. No other package of kvkit imports it."""
