"""Train a model: python train.py --help"""

import gc
import sys

from jaxformer.terminal import echo_status

if __name__ == "__main__":
    echo_status("loading JAX ...")  # before imports that take seconds
    gc.disable()  # saves a sixth of the import time; imports create no garbage; see `machine.set_up`
    from jaxformer.cli.train import main

    sys.exit(main())
