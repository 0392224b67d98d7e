"""Exit statuses of the command `fleet`; 2, for a misused command line, is argparse's own."""

DONE = 0
FAILED = 1
REFUSED = 3  # a configuration
