"""Facts about devices: of the device that cells are built for, and of the one that runs operators."""

from built_for import built_for
from mindspore import Tensor

from ms_gradaccum.backend import device


def test_a_cell_is_built_for_a_device_while_operators_run_on_another_one():
    here = device.this_device()
    other = "GPU" if here != "GPU" else "Ascend"
    assert device.device_target() == here
    with built_for(other):
        assert device.device_target() == other and device.this_device() == here
        assert device.can_partition() and device.has_data_sink() and not device.graphs_can_raise()
        assert device.is_host() == (here == "CPU") and device.sends_bfloat16() == (here != "CPU")
    assert device.device_target() == here


def test_a_tensor_is_in_the_memory_of_the_host_if_the_device_is_the_host():
    tensor = Tensor([1.0, 2.0])
    view = tensor.asnumpy()
    tensor[0] = 3.0
    assert (view[0] == 3.0) == device.is_host()
