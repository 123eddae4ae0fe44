"""The kvproxy service: maps both pools, moves KV, is the only writer, answers Aborts."""
