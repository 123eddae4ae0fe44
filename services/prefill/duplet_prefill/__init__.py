"""The prefill service: I/O process (this package) and engine process (duplet_engine)."""
