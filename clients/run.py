"""Train other projects' networks in their own trainers, with their own accumulation and with ours.

python clients/run.py                  # ./run.sh clients does, in an environment with all of them
python clients/run.py mindone --repeat 30

Prints how far each way ends from the whole batch and how long an update takes. Exit status 1 if something differs that
must not.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent
PROGRAMS = {"mindformers": "mindformers_llama.py", "mindcv": "mindcv_images.py", "mindone": "mindone_bert.py"}
# Of these there is only the source.
SOURCES = {"mindocr": "mindocr_text.py", "mindyolo": "mindyolo_detection.py", "models": "models_bert.py"}
PROGRAMS |= SOURCES
# One thread, and the instructions with which MindSpore's convolutions are not slow on many CPUs.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "TOKENIZERS_PARALLELISM": "false"}
# Nothing is downloaded while they run.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
LAST_LINES = 40


def rows_of(client: str, repeat: int) -> list[dict[str, Any]] | None:
    """Run the program of a client, which may print and write what it likes, and return its rows; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        log, rows = Path(folder, "log.txt"), Path(folder, "rows.json")
        command = [sys.executable, str(FOLDER / PROGRAMS[client]), str(rows), "--repeat", str(repeat)]
        with log.open("w") as output:
            environment = ENVIRONMENT | dict(os.environ) | OFFLINE
            status = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=output).returncode
        if status == 0:
            return json.loads(rows.read_text())
        lines = log.read_text(errors="replace").splitlines()
        print(f"{client} ended with status {status}:", *lines[-LAST_LINES:], sep="\n")
        return None


def version_of(client: str) -> str:
    """The version of a package, or the commit of a source."""
    if client not in SOURCES:
        return version(client)
    lines = [line.split() for line in (FOLDER / "sources.txt").read_text().splitlines()]
    (commit,) = [line[2] for line in lines if line[0] == client]
    return commit[:7]


def print_table(client: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{client} {version_of(client)}")
    print(f"{'':44}{'from the whole batch':>21}{'of its way':>11}{'update':>11}{'ratio':>7}")
    whole = []
    for number, row in enumerate(rows):
        if number == 0 or row["case"] != rows[number - 1]["case"]:
            print(row["case"])
            whole = row["seconds"]
        ratio = np.median(np.divide(row["seconds"], whole))
        distance = f"{row['difference']:21.1e}{row['of_movement']:11.1e}" if row["seconds"] is not whole else f"{'':32}"
        line = f"  {row['way']:42}{distance}{1000 * np.median(row['seconds']):8.1f} ms{ratio:7.2f}"
        print(line + ("  FAILS" if row["fails"] else "") + (f"  differs: {row['wrong']}" if row["wrong"] else ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("client", nargs="?", choices=PROGRAMS, help="which one; by default all")
    parser.add_argument("--repeat", type=int, default=10, help="timed updates of each way, in turns")
    arguments = parser.parse_args()
    fails = False
    tables = {}
    for client in [arguments.client] if arguments.client else PROGRAMS:
        print(f"Running {client}.", flush=True)
        rows = rows_of(client, arguments.repeat)
        fails |= rows is None or any(row["fails"] for row in rows)
        if rows is not None:
            tables[client] = rows
    print(
        "\nThe norm of the difference of the weights, relative to the norm of the whole batch's weights and to how far"
    )
    print("these have moved; the median time of an update, and the median ratio to the whole batch in the same turn.")
    for client, rows in tables.items():
        print_table(client, rows)
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
