"""A canary: the same utterances from a monolith and from a unit, heard and compared.

`utterances` what is said, `speaker` asks one side, `listener` and `ear` hear it, `journal` keeps
every pair, `tally` adds them up, `equivalence` and `verdict` judge, `watch` runs it all.
"""
