"""python train.py --help"""

import sys

from jaxformer.terminal import echo_status

if __name__ == "__main__":
    echo_status("loading JAX ...")  # before what takes seconds to import
    from jaxformer.cli.train import main

    sys.exit(main())
