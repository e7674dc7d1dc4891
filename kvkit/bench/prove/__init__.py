"""`kvkit prove`: whether what a KV connector restores is what the engine would have computed."""
