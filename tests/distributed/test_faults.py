"""A job that is killed ends soon, leaves no process, and goes on as if nothing had been. At length: ./run.sh faults."""

import os
import random
import signal
import time

from faults import FAULTS, finish, newest, running, story, strike, victim

PROCESSES = 2
# So long that it is not over before everything has been killed, on a slow machine neither.
LENGTH = {"FAULT_EPOCHS": "12"}


def test_a_training_that_is_killed_in_every_way_and_stands_still_is_the_one_that_is_left_alone(tmp_path_factory):
    alone, tmp_path = (tmp_path_factory.mktemp(name).resolve() for name in ("alone", "struck"))
    finish(alone, PROCESSES, **LENGTH)
    generator = random.Random(0)
    for fault in FAULTS:
        seconds = strike(fault, tmp_path, PROCESSES, generator, **LENGTH)
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
    assert story(tmp_path, PROCESSES) == story(alone, PROCESSES)
