"""`python -m pgcdc_assets.cli`."""

import sys

from pgcdc_assets.cli import main

sys.exit(main())
