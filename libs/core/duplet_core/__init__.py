"""Duplet's safety core: pure state machines of the transfer protocol.

No clock, no randomness, no I/O, no logging: every machine is fed events with the
time in integer nanoseconds and returns effects, which its service executes.
"""
