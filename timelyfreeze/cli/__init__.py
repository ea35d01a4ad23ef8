"""The command line: ``timelyfreeze`` and ``python -m timelyfreeze``."""
