"""The curves of a training, as a picture."""

from pathlib import Path

from workshop import results

_PANELS = (
    ("loss", "loss", 1.0),
    ("test_accuracy", "test accuracy in %", 100.0),
    ("learning_rate", "learning rate", 1.0),
)


def draw(title: str, history: list[dict[str, float]], target: Path) -> None:
    """Writes a PNG of loss, test accuracy and learning rate over the epochs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    epochs = [line["epoch"] for line in history]
    for axes, (name, label, factor) in zip(figure.subplots(1, 3), _PANELS, strict=True):
        axes.plot(epochs, [line[name] * factor for line in history], marker="o")
        axes.set_xlabel("epoch")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    with results.atomic_path(target) as path:
        figure.savefig(path, format="png")
