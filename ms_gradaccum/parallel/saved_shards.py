"""Shards in MindSpore's checkpoints, which hold whole parameters in their place."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Initializer, initializer
from mindspore.communication import GlobalComm, get_group_size
from mindspore.nn.utils import no_init_parameters

from ms_gradaccum.backend.arithmetic import as_flat
from ms_gradaccum.backend.arrays import Array
from ms_gradaccum.backend.plain_state import assign_in_place
from ms_gradaccum.parallel.reducer import GradientReducer


def stand_in(
    shard: Parameter,
    ranks: int,
    gather_rows: Callable[[Tensor], Tensor],
    own_rows: Callable[[Array], Array],
) -> Parameter:
    """Return a parameter of the whole shape without memory, which checkpoints hold in place of ``shard``.

    Loading it loads the shard. Saving, reading and copying it call its `gather`, a collective.
    """
    shape = (shard.shape[0] * ranks, *shard.shape[1:])

    def gather(_: object = None) -> Tensor:
        return ops.cast(gather_rows(as_flat(shard)).reshape(shape), shard.dtype)

    def whole(*_: object, **__: object) -> Parameter:
        return Parameter(gather(), shard.name, shard.requires_grad)

    def set_data(data: Tensor, slice_shape: bool = False) -> Parameter:
        assign_in_place(shard, Tensor(own_rows(data.asnumpy()), shard.dtype))
        return view

    with no_init_parameters():
        view = Parameter(
            initializer(_Gathered(gather), shape, shard.dtype), shard.name, shard.requires_grad
        )
    view.gather = gather
    view.set_data = set_data
    view.init_data = whole
    view.__deepcopy__ = whole
    for name in ("asnumpy", "get_bytes", "tolist"):
        setattr(view, name, lambda name=name: getattr(gather(), name)())
    return view


class _Gathered(Initializer):
    """Initializer of the copies of a stand-in: they begin with the gathered values."""

    def __init__(self, gather: Callable[[], Tensor]) -> None:
        super().__init__()
        self.gather = gather

    def _initialize(self, arr: Array) -> None:
        arr[...] = self.gather().asnumpy()


def whole_parameters(
    found: Iterable[tuple[str, Parameter]], reducers: Sequence[GradientReducer]
) -> Iterator[tuple[str, Parameter]]:
    """Yield the parameters of a training step as MindSpore saves and loads them: whole ones in place of shards."""
    stand_ins = _stand_ins_of(reducers)
    for name, parameter in found:
        saved = stand_ins.get(id(parameter), parameter)
        if saved is not None:
            yield name, saved


def gather_when_saved(step: nn.Cell, reducers: Sequence[GradientReducer]) -> None:
    """Make MindSpore's saving, which asks ``step`` for whole parameters, able to gather them."""
    # By name, which another cell may change.
    gathers = {
        view.name: view.gather for view in _stand_ins_of(reducers).values() if view is not None
    }
    if gathers:  # Without shards of ours, the layouts may be those of MindSpore's compiler.
        # Device matrix, tensor map, slice shape, field size, uniform split, shard group, shapes before and after a
        # reshape. MindSpore leaves out no part where it removes redundancy: all of the group have another one.
        layout = [[get_group_size()], [-1], [], 0, True, GlobalComm.WORLD_COMM_GROUP, [], []]
        step.parameter_layout_dict = dict.fromkeys(gathers, layout)
        step.parallel_parameter_merge_net_dict = gathers


def _stand_ins_of(reducers: Sequence[GradientReducer]) -> dict[int, Parameter | None]:
    found: dict[int, Parameter | None] = {}
    for reducer in reducers:
        found |= reducer.stand_ins
    return found
