"""Three conversations: from disk, over prefill and decode engines, and with blended documents."""
