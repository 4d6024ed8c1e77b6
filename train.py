"""python train.py --help"""

import sys

from jaxformer.terminal import announce

if __name__ == "__main__":
    announce("loading JAX ...")  # before what takes seconds to import
    from jaxformer.cli.train import main

    sys.exit(main())
