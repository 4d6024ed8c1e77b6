"""Sample from a model: python sample.py --help"""

from jaxformer.cli.command import exit_program
from jaxformer.cli.sample import main

if __name__ == "__main__":
    exit_program(main())
