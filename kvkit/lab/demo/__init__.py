"""Demo conversations: with KV on disk, over prefill and decode engines, and with blended documents."""
