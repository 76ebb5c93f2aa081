"""What the launcher starts is no test and runs only under msrun."""

collect_ignore_glob = ["*_worker.py"]
