"""Pictures without a window."""

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches, of 100 pixels each. Say what to install without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Drawing takes the package matplotlib, but got: {error}. "
            f"Install it with: pip install 'ms_gradaccum[plot]'."
        ) from None
    # Without pyplot: no window, and no state that outlives the picture.
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
