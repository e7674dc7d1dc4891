"""`kvkit prove`: a check that a KV connector restores what the engine would have computed."""
