"""The command line, which parses arguments, calls down and prints."""
