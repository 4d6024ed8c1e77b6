"""Train a model: python train.py --help"""

import gc

from jaxformer.terminal import echo_status

if __name__ == "__main__":
    echo_status("loading JAX ...")  # before imports that take seconds
    gc.disable()  # saves a sixth of the import time; imports create no garbage; see `machine.set_up`
    from jaxformer.cli.command import exit_program
    from jaxformer.cli.train import main

    exit_program(main())
