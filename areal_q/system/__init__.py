"""The machine underneath: the run's directory, files, ports, processes and secrets."""
