"""Views of running caches: `kvkit top` and `kvkit report`."""
