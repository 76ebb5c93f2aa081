"""The parameters of a hand-written loop, as MindSpore's own functions save and load them."""

from collections.abc import Iterator

from mindspore import Parameter, nn

from ms_gradaccum.backend.optimizers import claim_optimizers
from ms_gradaccum.loops.network_trainer import TrainedNetwork
from ms_gradaccum.parallel.saved_shards import gather_when_saved, whole_parameters
from ms_gradaccum.training.events import Observed
from ms_gradaccum.training.window import reducers_of

_OWNER = "Accumulator"


class SavedLoop(Observed, nn.Cell):
    """A cell whose parameters are all those of its loop, although the networks are not among its cells."""

    def set_windows(self, windows: list[TrainedNetwork]) -> None:
        """Set the windows of all networks, which own the optimizers from now on."""
        self.windows = windows
        claim_optimizers(windows)
        gather_when_saved(self, reducers_of(self.windows))

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Iterate over all parameters of the training, see ``nn.Cell.parameters_and_names``."""
        for each in self.windows:
            each.count.read()  # It writes the number of batches, if the host has not yet.
        # The networks come first: MindSpore may load a parameter from the first name that ends with its own.
        cells = [each.network for each in self.windows]
        for each in self.windows:
            cells += each.ends.of_optimizers
        cells.append(self.extras)
        found = nn.CellList(cells, auto_prefix=False).parameters_and_names(name_prefix, expand)
        return whole_parameters(found, reducers_of(self.windows))

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Keep the names, which are those of the networks and optimizers, when another cell gets this one."""

    def init_parameters_data(self, auto_parallel_mode: bool = False) -> dict[Parameter, Parameter]:
        """Initialize parameters, see ``nn.Cell.init_parameters_data``. MindSpore's saving begins with it."""
        seen: dict[str, Parameter] = {}
        for parameter in self.get_parameters():
            if seen.setdefault(parameter.name, parameter) is not parameter:
                raise ValueError(
                    f"For 'Accumulator', the parameters of networks and optimizers must have different names, but "
                    f"got two {parameter.name!r}. Rename one, such as optimizer.global_step.name = '...', or use "
                    f"save_state() and load_state()."
                )
        replaced: dict[Parameter, Parameter] = super().init_parameters_data(auto_parallel_mode)
        return replaced
