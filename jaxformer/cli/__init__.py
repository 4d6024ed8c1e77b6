"""The command line: parses arguments, sets up the machine, and wires training, decoding and inspection together."""
