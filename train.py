"""python train.py --help"""

import sys

from jaxformer.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
