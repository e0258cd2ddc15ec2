"""The command line: parsing, printing and exit codes; the work is in `hybridstate.api`."""
