"""Load for a unit: traces, clients that play what they hear, and what they measured."""
