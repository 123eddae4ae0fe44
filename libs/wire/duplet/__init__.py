"""Generated stubs of the contract; the sources are in `protos/`."""
