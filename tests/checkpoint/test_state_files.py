"""States on the disk: whole or not at all, and nothing that is damaged or foreign is used."""

import errno
import itertools
import json
import os
import pickle
import re
import shutil
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from linear_toy import batches, line, momentum, toy, toy_step, weight_of
from loop_toy import own_loop
from mindspore import Tensor
from no_space import no_file_larger_than
from open_window import window_of
from refusal import refuses
from safetensors.numpy import load_file, save_file
from tiers import share_of

from ms_gradaccum import StateCheckpoint, load_state, save_state
from ms_gradaccum.checkpoint import files
from ms_gradaccum.checkpoint.contents import Contents

pytestmark = pytest.mark.usefixtures("eager")
X = Tensor(np.arange(1, 5, dtype=np.float32).reshape(4, 1))


def new_step(accumulation_steps=3, **settings):
    return toy_step(2, make_optimizer=momentum, accumulation_steps=accumulation_steps, **settings)[1]


def held(step):
    numbers = {name: item.asnumpy().tolist() for name, item in step.parameters_and_names()}
    return numbers, vars(step.events)["batches"], step.events.updates, window_of(step).ends.overflows_in_a_row


@pytest.fixture
def saved(tmp_path):
    """Two states of a training, the second one with an open window."""
    step = new_step()
    save_state(step, tmp_path)
    for _ in range(4):
        step(X, 2 * X)
    return save_state(step, tmp_path).path


def assert_refused(state, text, step=None):
    step = step or new_step()
    step(X, X)
    before = held(step)
    with pytest.raises(ValueError) as error:
        load_state(step, state.parent)
    message = str(error.value)
    assert message.startswith(f"For 'load_state', the state {state} cannot be used: ")
    assert text in message and "Nothing was changed." in message
    assert message.endswith(f"Give the folder of the state before it, {state.parent / 'state-000001'}.")
    assert held(step) == before


class Killed(BaseException):
    pass


@contextmanager
def kill_at(number):
    """Let the program end at the so-manyth thing that it does to the disk; a write is then done by half."""
    things = itertools.count()

    def counted(module, name, by_half=None):
        real = getattr(module, name)

        def call(*args, **kwargs):
            if next(things) == number:
                if by_half is not None:
                    by_half(*args)
                raise Killed
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call)

    with pytest.MonkeyPatch.context() as monkeypatch:
        counted(files, "_write", lambda path, data: path.write_bytes(data[: len(data) // 2]))
        counted(files, "_sync")
        counted(files.Path, "mkdir")
        counted(files.Path, "rename")
        counted(files.shutil, "rmtree", lambda path, **_: next(path.glob("*.json")).unlink(missing_ok=True))
        monkeypatch.setattr(files, "remove_partial", lambda *_: None)
        yield


def test_a_kill_at_any_instant_leaves_the_state_before_it_whole(tmp_path):
    for number in range(100):
        folder, step = tmp_path / str(number), new_step()
        step(X, 2 * X)
        for _ in range(2):
            save_state(step, folder, keep_checkpoint_max=2)
        before = held(step)
        step(X, 2 * X)
        after = held(step)
        killed = True
        with kill_at(number), suppress(Killed):
            save_state(step, folder, keep_checkpoint_max=2)
            killed = False
        loaded = new_step()
        state = load_state(loaded, folder).path.name
        assert (state, held(loaded)) in [("state-000002", before), ("state-000003", after)]
        assert killed or state == "state-000003"
        save_state(step, folder, keep_checkpoint_max=2)
        assert len(list(folder.iterdir())) == 3  # the lock; nothing of the attempt is left
        if not killed:
            break
    assert number > 10


def test_a_full_disk_is_told_and_loses_nothing(saved):
    step = new_step()
    load_state(step, saved.parent)
    before = held(step)
    with no_file_larger_than(100), pytest.raises(OSError) as error:
        save_state(step, saved.parent)
    assert error.value.errno == errno.EFBIG
    assert f"For 'save_state', the state cannot be written to {saved.parent}: File too large." in str(error.value)
    assert sorted(path.name for path in saved.parent.iterdir()) == [files.LOCK, "state-000001", "state-000002"]
    assert held(step) == before
    assert save_state(step, saved.parent).path.name == "state-000003"


WHOLE, OWN = "parameters-00000.safetensors", "rank_0/parameters-00000.safetensors"
DAMAGES = {
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not have the"),
    "other byte": (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), "has another checksum"),
    "missing": (lambda path: path.unlink(), "cannot be read (No such file or directory)"),
    "link": (lambda path: (path.rename(path.with_name("x")), path.symlink_to("x")), "does not have the"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "cannot be read (Is a directory)"),
}


@pytest.mark.parametrize("file", [WHOLE, OWN])
@pytest.mark.parametrize("change, text", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_named_and_the_state_before_it_offered(change, text, file, saved):
    change(saved / file)
    assert_refused(saved, f"{saved / file} {text}")


def sign(state, manifest):
    (state / files.MANIFEST).write_text(json.dumps(files.signed(manifest)))


def with_checksum(state, name, data):
    """Put other bytes into a file, and what belongs to them into the manifest."""
    (state / name).write_bytes(data)
    manifest = json.loads((state / files.MANIFEST).read_text())
    manifest["files"][name] = {"size": len(data), "sha256": files.hashlib.sha256(data).hexdigest()}
    sign(state, manifest)


class Evil:
    def __reduce__(self):
        return os.abort, ()


def test_a_file_that_is_no_safetensors_is_refused_and_never_executed(saved):
    with_checksum(saved, WHOLE, pickle.dumps(Evil()))
    assert_refused(saved, "is not a safetensors file")


SUM, WEIGHT = "accu_grads.weight", "accu_grads.weight.window_weight"
SUM, WEIGHT = "accu_grads.weight", "accu_grads.weight.window_weight"
# The file, the tensor, what takes its place, and what is said.
CHANGES = {
    "shape": (WHOLE, "weight", np.zeros((2, 1), np.float32), "'weight' as Float32 (2, 1)"),
    "dtype": (WHOLE, "weight", np.zeros((1, 1), np.float64), "'weight' as Float64 (1, 1)"),
    "missing": (WHOLE, "weight", None, "it lacks weight"),
    "another": (WHOLE, "other", np.zeros(1, np.float32), "also has other"),
    "a sum among the others": (WHOLE, SUM, np.zeros(3, np.float32), "as Float32 (3,), where Float32 (1, 1) is"),
    "another sum": (OWN, SUM, np.zeros(2, np.float32), f"has {SUM!r} as Float32 (2,), where "),
    "no sum": (OWN, SUM, None, "it lacks "),
    "another weight of the window": (OWN, WEIGHT, np.zeros(2, np.float32), f"has {WEIGHT!r} as Float32 (2,), where "),
    "no weight of the window": (OWN, WEIGHT, None, "it lacks "),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_tensors_than_those_of_the_network_and_its_window_are_refused(change, saved, tmp_path):
    file, name, value, text = CHANGES[change]
    tensors = {key: tensor for key, tensor in load_file(saved / file).items() if key != name}
    save_file(tensors | ({} if value is None else {name: value}), tmp_path / "other")
    with_checksum(saved, file, (tmp_path / "other").read_bytes())
    assert_refused(saved, text)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "rank_0/../../x", "x.pkl", "parameters-1.safetensors"]
)
def test_a_manifest_leads_to_no_other_file(name, saved):
    manifest = json.loads((saved / files.MANIFEST).read_text())
    manifest["files"][name] = {"size": 1, "sha256": ""}
    sign(saved, manifest)
    assert_refused(saved, f"lists the file {name!r} in a way that this version does not write")


MANIFESTS = {
    "no JSON": (b"{", "is not valid JSON"),
    "deep": (b"[" * 10**6, "is not valid JSON"),
    "a list": (b"[]", "is not the manifest"),
    "a later version": (b'{"format": "ms_gradaccum", "version": 99}', "has the version 99, not 2"),
    "no files": (json.dumps(files.signed({"format": "ms_gradaccum", "version": 2})).encode(), "lacks its files"),
    "no checksum": (b'{"format": "ms_gradaccum", "version": 2}', "has another checksum"),
    "bytes": (b"\xff\xfe\x00", "is not valid JSON"),
}


@pytest.mark.parametrize("content, text", MANIFESTS.values(), ids=MANIFESTS)
def test_a_manifest_that_is_none_is_refused(content, text, saved):
    (saved / files.MANIFEST).write_bytes(content)
    assert_refused(saved, f"{saved / files.MANIFEST} {text}")


def changed_digits(text):
    """The text with another digit, at each place where it has one."""
    for i, letter in enumerate(text):
        if letter.isdigit():
            yield text[:i] + str((int(letter) + 1) % 10) + text[i + 1 :]


def test_each_changed_digit_of_a_manifest_is_refused(saved):
    manifest = saved / files.MANIFEST
    good = json.loads(manifest.read_text())
    good["ranks"][0]["random"] = {}  # 624 numbers, of which one is like the other.
    for changed in changed_digits(json.dumps(files.signed(good))):
        manifest.write_text(changed)
        with pytest.raises(files.DamagedState, match="another checksum|has the version"):
            files.read_manifest(saved)


def test_a_state_of_other_settings_is_refused(saved):
    assert_refused(saved, "has 1 batches in its window, where accumulation_steps is 1", new_step(1))
    assert_refused(saved, "it lacks accu_grads.weight.window_dropped", new_step(bad_micro_batch="drop"))
    text = "another network, optimizer or setting: it lacks mixed_precision"
    assert_refused(saved, text, new_step(mixed_precision="fp16"))
    # What is offered works.
    assert load_state(new_step(), saved.parent / "state-000001").batches == 0


def test_a_step_and_a_loop_do_not_take_each_others_states(saved, tmp_path):
    _, accumulator = own_loop(make_optimizer=momentum)
    with refuses(ValueError, "it lacks the loop"):
        load_state(accumulator, saved)
    save_state(accumulator, tmp_path / "loop")
    with refuses(ValueError, "it has the loop"):
        load_state(new_step(), tmp_path / "loop")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_subnormal=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places_in(value, path=()):
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:8]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places_in(item, (*path, key))


@pytest.mark.parametrize("kind", ["step", "loop"])
def test_no_manifest_crashes_or_is_taken_by_half(kind, tmp_path):
    step = new_step() if kind == "step" else own_loop(3)[1]
    train = step if kind == "step" else step.backward
    if kind == "loop":
        step.prepare([(X, X)])
    train(X, X)
    state = save_state(step, tmp_path).path
    # What the step is at when it is to load the first state; all its numbers are others.
    train(X, X)
    other = save_state(step, tmp_path).path
    good = json.loads((state / files.MANIFEST).read_text())
    places = [place for place in places_in(good) if place]

    def everything():
        return [item.asnumpy().tobytes() for item in step.get_parameters()], Contents(step).state_dict()

    @settings(max_examples=share_of(300), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(places), JSON)
    def check(place, value):
        manifest = json.loads(json.dumps(good))
        inner = manifest
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        before = everything()
        # Someone may mean to change it, and write the checksum anew.
        sign(state, manifest)
        try:
            load_state(step, state)
        except ValueError as error:
            assert str(error).startswith("For 'load_state', the state ") and "Nothing was changed." in str(error)
            assert everything() == before
        else:
            load_state(step, other)

    check()


@pytest.mark.parametrize("call", [save_state, load_state])
def test_wrong_arguments(call, tmp_path):
    with refuses(TypeError, f"For '{call.__name__}'", "'step'"):
        call(line(), tmp_path)
    for directory in (None, 3, b"x"):
        with refuses(TypeError, "'directory'"):
            call(new_step(), directory)
    for directory in ("", "a\0b", "\ud800"):
        with refuses(ValueError, "'directory'"):
            call(new_step(), directory)
    with refuses(TypeError, "'keep_checkpoint_max'"):
        save_state(new_step(), tmp_path, keep_checkpoint_max="2")
    for extra in ([], {"x": object()}, {"x": Tensor([1])}, {(1, 2): 3}):
        with refuses(TypeError, "'extra'"):
            save_state(new_step(), tmp_path, extra=extra)
    assert list(Path(tmp_path).iterdir()) == []


def test_a_renamed_state_is_loaded_by_its_folder(tmp_path):
    step = new_step()
    step(X, 2 * X)
    state = save_state(step, tmp_path / "run").path
    renamed = state.rename(state.with_name("best"))
    named = re.escape(f"{state.parent}, which has 'best'. Give the folder of save_state(), or the folder")
    with pytest.raises(ValueError, match=named):
        load_state(new_step(), state.parent)
    # A training that would go on from it does not begin anew without a word.
    with pytest.raises(ValueError, match=named):
        toy()[1].train(1, batches(2), callbacks=[StateCheckpoint(state.parent)], resume=True)
    # A folder of another program is no state.
    (state.parent / "another").mkdir()
    (state.parent / "another" / files.MANIFEST).write_text('{"format": "other"}')
    with pytest.raises(ValueError, match=named):
        load_state(new_step(), state.parent)
    fresh = new_step()
    assert load_state(fresh, renamed).path == renamed
    assert held(fresh) == held(step)


def test_a_manifest_of_another_program_hides_no_state(tmp_path):
    (tmp_path / files.MANIFEST).write_text('{"format": "other"}')
    for folder, said in ((tmp_path, f"{tmp_path}, which has none"), (tmp_path / "none", str(tmp_path / "none"))):
        with refuses(ValueError, "'directory'", said):
            load_state(new_step(), folder)
    state = save_state(new_step(), tmp_path).path
    assert load_state(new_step(), tmp_path).path == state


@pytest.mark.parametrize("event", ["on_micro_batch_begin", "on_micro_batch_end", "on_update_begin"])
def test_a_step_is_saved_between_its_batches_alone(event, tmp_path):
    """Inside a batch the sums have a part of it, or all of a batch that is not counted yet."""
    step = new_step(2)
    refused = []

    class Saves:
        def on_update_end(self, event):
            save_state(step, tmp_path)
            assert step.flush() is None

    def save(self, event):
        for call in (lambda: save_state(step, tmp_path), lambda: load_state(step, tmp_path), step.flush):
            with refuses(RuntimeError, "come between two batches"):
                call()
            refused.append(event.batch)

    setattr(Saves, event, save)
    step.add_callback(Saves())
    for _ in range(2):
        step(X, X)
    assert 2 in refused
    assert load_state(new_step(2), tmp_path).updates == 1
    with refuses(ValueError, "at least one row"):
        step(X[:0], X[:0])
    step(X, X)
    save_state(step, tmp_path)  # In mid-window, and after a batch that has failed.
    fresh = new_step(2)
    load_state(fresh, tmp_path)
    assert held(fresh) == held(step)


def test_a_loop_is_loaded_between_its_batches_alone(tmp_path):
    _, accumulator = own_loop()
    save_state(accumulator, tmp_path)
    with refuses(RuntimeError, "loaded between two"):
        with accumulator.accumulate():
            accumulator.backward(X, X)
            load_state(accumulator, tmp_path)


HOLDER = """
import sys
from pathlib import Path
from ms_gradaccum.checkpoint import files
files.claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_job_in(folder):
    """Another process that saves into ``folder``, until its standard input is closed."""
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout.readline() == "claimed\n"
        yield job


def test_a_folder_into_which_another_job_saves_is_refused_and_left_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINGERS", 0.2)
    step = new_step()
    (tmp_path / ".partial-state-000001").mkdir()  # What the other job is writing.
    with another_job_in(tmp_path) as job:
        with pytest.raises(RuntimeError) as error:
            save_state(step, tmp_path)
        network, model = toy()
        with refuses(RuntimeError, "End that job"):
            model.train(1, batches(2), callbacks=[StateCheckpoint(tmp_path)])
        assert weight_of(network) == 0
    assert f"process {job.pid} on {socket.gethostname()} saves into {tmp_path}" in str(error.value)
    assert (tmp_path / ".partial-state-000001").exists() and files.states_in(tmp_path) == []
    # Once it has ended, however that came, the folder is free.
    assert save_state(step, tmp_path).path.name == "state-000001"


def test_a_job_waits_for_one_that_is_ending(tmp_path):
    with another_job_in(tmp_path) as job:
        threading.Timer(0.5, job.stdin.close).start()
        assert save_state(new_step(), tmp_path).path.name == "state-000001"


def test_steps_of_one_process_may_share_a_folder_and_none_keeps_more_than_some_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MANY_FOLDERS", 3)
    monkeypatch.setattr(files, "_claimed", {})
    for number in range(5):
        for _ in range(2):
            save_state(new_step(), tmp_path / str(number))
    assert [path.parent.name for path in files._claimed] == ["2", "3", "4"]
    shutil.rmtree(tmp_path / "4")
    save_state(new_step(), tmp_path / "4")
    assert (tmp_path / "4" / files.LOCK).exists()
