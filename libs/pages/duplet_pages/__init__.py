"""What lb, the I/O processes and the engines agree on about models and pages; no torch."""
