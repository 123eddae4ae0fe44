"""`python -m duplet_engine --config JSON --link-fd N`."""

import sys

from duplet_engine.process import main

sys.exit(main())
