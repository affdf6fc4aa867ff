"""Load-balancing proxy in front of prefill and decode nodes."""
