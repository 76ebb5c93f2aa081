"""Start a sample, end it in any case, and see what it leaves."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

SAMPLES = Path(__file__).parents[2] / "sample_code"
SAMPLE = SAMPLES / "distributed_gradient_accumulation"
SUBSET = SAMPLES / "data" / "fashion_mnist"

sys.path.append(str(SAMPLES / "data"))
import find_data  # noqa: E402, F401


@contextmanager
def running_sample(
    folder, script=SAMPLE / "run.sh", limit=300, tools=None, arguments=(), output=subprocess.PIPE, **variables
):
    """A sample's run.sh, started in ``folder`` with this Python's environment; ended after ``limit`` seconds.

    ``tools`` is a folder of programs that are found before any other, ``output`` where it writes to.
    """
    folders = [*([tools] if tools else []), Path(sys.executable).parent, os.environ["PATH"]]
    environment = {**os.environ, **variables, "PATH": os.pathsep.join(map(str, folders))}
    options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output, "text": True}
    with subprocess.Popen(["bash", str(script), *arguments], cwd=folder, env=environment, **options) as sample:
        end = threading.Timer(limit, sample.terminate)
        end.start()
        try:
            yield sample
        finally:
            end.cancel()
            sample.terminate()


def run_sample(folder, **settings):
    """Run the sample to its end and return its exit status and both its outputs."""
    with running_sample(folder, **settings) as sample:
        output, errors = sample.communicate()
    return subprocess.CompletedProcess(sample.args, sample.returncode, output, errors)


def processes_in(folder):
    """The environments of the running processes whose working directory is ``folder``, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == folder:
                found[int(process.name)] = (process / "environ").read_text().split("\0")
        except OSError:  # it has ended
            continue
    return found
