"""Converters between the contract and duplet_core types, and codecs of peer streams."""
