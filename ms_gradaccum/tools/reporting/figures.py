"""Figures that are drawn without a display."""

from typing import Any


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of this size in inches, at 100 dpi. Raise a clear error without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"Drawing takes the package matplotlib, but got: {error}. "
            f"Install it with: pip install 'ms_gradaccum[plot]'."
        ) from None
    # pyplot is not used because it keeps global state and may open a window.
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
