"""The rules of services and engines that are switched off, by what they are about.

No simulator runs these parts. The machines' own rules are switched off in `duplet_sim.rules`,
but for some that no simulated peer can show.
"""

from __future__ import annotations

from tests.mutants.rules_admission import FULL_UNIT, TIMED_STEPS
from tests.mutants.rules_core import MACHINES
from tests.mutants.rules_engine import LOOPS
from tests.mutants.rules_kvproxy import COPIES, TABLES_OF_PAGES
from tests.mutants.rules_proofs import DEATHS, DIGESTS, POOLS_AND_PAGES
from tests.mutants.rules_streams import MESSAGES

RULES = (
    *COPIES,
    *TABLES_OF_PAGES,
    *DEATHS,
    *POOLS_AND_PAGES,
    *DIGESTS,
    *LOOPS,
    *FULL_UNIT,
    *TIMED_STEPS,
    *MESSAGES,
    *MACHINES,
)
