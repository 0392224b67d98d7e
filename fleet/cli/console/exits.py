"""Exit statuses of the command `fleet`."""

DONE = 0
FAILED = 1
MISUSED = 2  # the command line was refused by its parser
CONFIGURATION_REFUSED = 3  # a configuration, another input file or the value of an option was refused
HUNG = 4  # `fleet serve worker` only: the engine made no progress, so the worker has to be started again
REPLACED = 5  # `fleet serve worker` only: another process has registered with the worker's id
