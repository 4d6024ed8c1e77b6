"""python train.py --help"""

import gc
import sys

from jaxformer.terminal import echo_status

if __name__ == "__main__":
    echo_status("loading JAX ...")  # before what takes seconds to import
    gc.disable()  # a sixth of the time of imports, which make no garbage; see `machine.set_up`
    from jaxformer.cli.train import main

    sys.exit(main())
