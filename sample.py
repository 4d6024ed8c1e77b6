"""Sample from a model: python sample.py --help"""

import sys

from jaxformer.cli.sample import main

if __name__ == "__main__":
    sys.exit(main())
