"""A job that is killed ends soon, leaves no process, and goes on as if nothing had been. At length: ./run.sh faults."""

import os
import random
import signal
import time

import pytest
from faults import FAULTS, finish, newest, running, story, strike, victim

PROCESSES = 2
# So long that it is not over before everything has been killed, on a slow machine neither.
LENGTH = {"FAULT_EPOCHS": "12"}
GENERATOR = random.Random(0)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the losses and the end of a training without a fault."""
    folder = tmp_path_factory.mktemp("alone").resolve()
    finish(folder, PROCESSES, **LENGTH)
    return story(folder, PROCESSES)


def test_a_training_that_is_killed_in_every_way_and_stands_still_is_the_one_that_is_left_alone(alone, tmp_path):
    for fault in FAULTS:
        seconds = strike(fault, tmp_path, PROCESSES, GENERATOR, **LENGTH)
        assert seconds is not None, f"the training was over before {fault} was killed"
    begun = newest(tmp_path)
    with running(tmp_path, PROCESSES, **LENGTH) as job:
        while newest(tmp_path) < begun + 2:
            assert job.poll() is None
            time.sleep(0.01)
        process = victim("worker", job, tmp_path)
        os.kill(process, signal.SIGSTOP)
        time.sleep(2)
        state = newest(tmp_path)
        time.sleep(1)
        assert newest(tmp_path) == state  # the others do not go on without it
        os.kill(process, signal.SIGCONT)
        assert job.wait(timeout=300) == 0
    assert story(tmp_path, PROCESSES) == alone
