"""The monolith's host: prefill and decode in one process over one pool, for comparison."""
