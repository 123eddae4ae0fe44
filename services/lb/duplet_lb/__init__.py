"""The lb service: the unit's front door; no GPU, no torch."""
