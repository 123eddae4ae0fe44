"""Speech of the built-in model: text to prompts, rows to samples, voices."""
